// What every client needs: a channel, deadlines, the details of an error, retries, and token arrays.
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

import type { ProtoGrpcType as AgentTypes } from "./gen/agent_service.js";
import type { ProtoGrpcType as MembershipTypes } from "./gen/membership_service.js";
import type { ProtoGrpcType as RewardTypes } from "./gen/reward_service.js";
import type { ProtoGrpcType as RolloutTypes } from "./gen/rollout_service.js";

// The major version of the contract that this program was written for.
const CONTRACT_MAJOR = "1";
const MAX_ATTEMPTS = 8;

const definition = loader.loadSync(
  [
    "fourfold/rollout/v1/rollout_service.proto",
    "fourfold/agent/v1/agent_service.proto",
    "fourfold/reward/v1/reward_service.proto",
    "fourfold/coordinator/v1/membership_service.proto",
    "google/rpc/status.proto",
    "google/rpc/error_details.proto",
  ],
  // No number of the contract is above 2^53, so that a double holds it.
  { includeDirs: [fileURLToPath(new URL("../protos", import.meta.url))], longs: Number, enums: String, defaults: true, oneofs: true },
);
const root = grpc.loadPackageDefinition(definition) as unknown as AgentTypes & RolloutTypes & RewardTypes & MembershipTypes;
export const { RolloutService } = root.fourfold.rollout.v1;
export const { AgentService } = root.fourfold.agent.v1;
export const { RewardService } = root.fourfold.reward.v1;
export const { MembershipService } = root.fourfold.coordinator.v1;

interface Any {
  type_url: string;
  value: Buffer;
}

function decode<T>(name: string, bytes: Buffer): T {
  const type = definition[name] as loader.MessageTypeDefinition<object, object>;
  return type.deserialize(bytes) as T;
}

/** Return a message as bytes; its name is a full one, such as google.rpc.Status. */
export function encode(name: string, message: object): Buffer {
  const type = definition[name] as loader.MessageTypeDefinition<object, object>;
  return type.serialize(message);
}

/** Options of a channel: services of a run are not behind the proxy that http_proxy names. */
export const DIRECT: grpc.ChannelOptions = { "grpc.enable_http_proxy": 0 };

/** Return credentials and options: TLS and a bearer token with FOURFOLD_CA and FOURFOLD_TOKEN, otherwise plain text. */
export function connection(role: "rollout" | "gateway"): [grpc.ChannelCredentials, grpc.ChannelOptions] {
  const authority = process.env.FOURFOLD_CA;
  const limits = { "grpc.max_receive_message_length": 16 << 20, "grpc.keepalive_time_ms": 20_000 };
  // The contract's own retry rules are below; grpc-js would repeat some calls by itself.
  const options: grpc.ChannelOptions = { ...limits, ...DIRECT, "grpc.enable_retries": 0 };
  if (!authority) return [grpc.credentials.createInsecure(), options];
  const token = grpc.credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", `Bearer ${process.env.FOURFOLD_TOKEN ?? ""}`);
    done(null, metadata);
  });
  const tls = grpc.credentials.createSsl(readFileSync(authority));
  // The certificate names the role of the service, not its machine.
  return [
    grpc.credentials.combineChannelCredentials(tls, token),
    { ...options, "grpc.ssl_target_name_override": `${role}.fourfold` },
  ];
}

/** Every call needs a deadline; the service refuses one without. */
export function within(seconds: number): { deadline: Date } {
  return { deadline: new Date(Date.now() + seconds * 1000) };
}

/** Make one unary call; a method of a generated client takes a request, options and a callback. */
export function unary<Response>(
  start: (callback: (error: grpc.ServiceError | null, response?: Response) => void) => unknown,
): Promise<Response> {
  return new Promise((resolve, reject) => {
    start((error, response) => (error ? reject(error) : resolve(response as Response)));
  });
}

/** Return the reason of an error for programs, and the pause in milliseconds that the service asks for. */
export function details(error: grpc.ServiceError): { reason: string; pauseMs?: number } {
  const found: { reason: string; pauseMs?: number } = { reason: grpc.status[error.code] ?? "UNKNOWN" };
  const bytes = error.metadata?.get("grpc-status-details-bin")[0];
  if (!Buffer.isBuffer(bytes)) return found;
  for (const detail of decode<{ details: Any[] }>("google.rpc.Status", bytes).details) {
    const name = detail.type_url.split("/").pop() ?? "";
    if (name === "google.rpc.ErrorInfo") {
      found.reason = decode<{ reason: string }>(name, detail.value).reason;
    } else if (name === "google.rpc.RetryInfo") {
      const delay = decode<{ retryDelay?: { seconds: number; nanos: number } }>(name, detail.value).retryDelay;
      if (delay) found.pauseMs = delay.seconds * 1000 + delay.nanos / 1e6;
    }
  }
  return found;
}

export function isServiceError(error: unknown): error is grpc.ServiceError {
  return error instanceof Error && "code" in error && "metadata" in error;
}

/**
 * Repeat an attempt while the service is overloaded or unavailable. Use this only for what is safe to repeat: idempotent
 * calls, and a stream before its first response.
 */
export async function retrying<T>(attempt: () => Promise<T>, mayRepeat: () => boolean = () => true): Promise<T> {
  for (let number = 1; ; number++) {
    try {
      return await attempt();
    } catch (error) {
      if (!isServiceError(error) || number === MAX_ATTEMPTS || !mayRepeat()) throw error;
      const { reason, pauseMs } = details(error);
      const overloaded = error.code === grpc.status.RESOURCE_EXHAUSTED && pauseMs !== undefined;
      if (error.code !== grpc.status.UNAVAILABLE && !overloaded) throw error;
      const pause = pauseMs ?? Math.min(100 * 2 ** number, 5_000);
      console.error(`${reason}; attempt ${number + 1} in ${Math.round(pause)} ms`);
      await new Promise((done) => setTimeout(done, pause * (1 + Math.random() / 4)));
    }
  }
}

/** Fail unless the service has our major version of the contract; an older service returns no version. */
export function checkContract(version: string): void {
  if (version && version.split(".")[0] !== CONTRACT_MAJOR) {
    throw new Error(`the service has contract ${version}, this program ${CONTRACT_MAJOR}.x: use the protos of its version`);
  }
}

/** Read little-endian int32: token ids. */
export function int32s(bytes: Buffer): number[] {
  return Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readInt32LE(4 * i));
}

/** Read little-endian float32: log-probabilities. */
export function float32s(bytes: Buffer): number[] {
  return Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readFloatLE(4 * i));
}
