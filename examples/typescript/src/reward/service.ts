// The two methods of RewardService, with the rules of the contract that hold for every scorer.
import * as grpc from "@grpc/grpc-js";

import type { ScoreItem__Output } from "../gen/fourfold/reward/v1/ScoreItem.js";
import type { ScoreRequest__Output } from "../gen/fourfold/reward/v1/ScoreRequest.js";
import type { ScoreResponse } from "../gen/fourfold/reward/v1/ScoreResponse.js";
import type { SampleScore } from "../gen/fourfold/reward/v1/SampleScore.js";
import { RewardService, encode } from "../client.js";

export const SERVICE = "fourfold.reward.v1.RewardService";
const CONTRACT_VERSION = "1.4"; // of the protos that this program was written for
const MAX_SAMPLES = 1024; // of one call
const MAX_QUEUED_SAMPLES = 8192; // of all calls in progress
const MAX_REQUEST_BYTES = 8 << 20;
const MAX_METADATA_BYTES = 64 << 10;
const ID = /^[A-Za-z0-9_-]{1,128}$/;
// The response leaves this long before the caller's deadline: after it, finished scores would be lost.
const ANSWER_MARGIN_MS = 500;

export type Item = ScoreItem__Output;
export type Outcome = { score: number; components?: Record<string, number> } | { abstain: string };

// Reasons of errors of single samples, and their google.rpc.Code. UNAVAILABLE and DEADLINE_EXCEEDED: a retry may help.
const CODES = {
  BAD_METADATA: grpc.status.INVALID_ARGUMENT,
  NOT_FINITE: grpc.status.OUT_OF_RANGE,
  NOT_FOUND: grpc.status.NOT_FOUND,
  RAISED: grpc.status.UNKNOWN,
  TIMEOUT: grpc.status.DEADLINE_EXCEEDED,
  UPSTREAM: grpc.status.UNAVAILABLE, // for a scorer that asks another service
};

/** An error of one sample, in place of its score; the other samples of the call are scored. */
export class ScoreError extends Error {
  constructor(readonly reason: keyof typeof CODES, message: string) {
    super(message);
  }
}

/** An error of a whole call: nothing is scored. */
export class Refusal extends Error {
  constructor(
    readonly code: grpc.status,
    readonly reason: string,
    message: string,
    readonly retryMs = 0,
  ) {
    super(message);
  }
}

/** What serves: its name as name@version, and a function that scores one sample. */
export interface Scorer {
  name: string;
  pure: boolean;
  score(item: Item, signal: AbortSignal): Outcome | Promise<Outcome>;
}

type Call<Request> = grpc.ServerUnaryCall<Request, unknown>;
type Sized = ScoreRequest__Output & { encodedBytes?: number };

/** Add RewardService to a server. `authorize` throws a Refusal for a caller that may not call it. */
export function addRewardService(server: grpc.Server, scorer: Scorer, authorize: (call: Call<unknown>) => void): void {
  const { GetInfo, Score } = RewardService.service;
  const info = {
    name: scorer.name, maxSampleCount: MAX_SAMPLES, contractVersion: CONTRACT_VERSION, pure: scorer.pure,
  };
  let queued = 0;

  async function score(request: Sized, call: Call<unknown>): Promise<ScoreResponse> {
    const items = request.items;
    checkRequest(request);
    if (queued + items.length > MAX_QUEUED_SAMPLES) {
      throw new Refusal(
        grpc.status.RESOURCE_EXHAUSTED, "TOO_MANY_SAMPLES", `${queued} samples are queued; try again later`, 1000,
      );
    }
    queued += items.length;
    const limit = new Limit(call);
    try {
      return { scores: await Promise.all(items.map((item) => outcome(scorer, item, limit))) };
    } finally {
      limit.release();
      queued -= items.length;
    }
  }

  const limited = {
    GetInfo,
    // The size of a request is known only here. A request that is no message is refused as one without items.
    Score: { ...Score, requestDeserialize: (bytes: Buffer): Sized => sized(bytes, Score.requestDeserialize) },
  };
  server.addService(limited, {
    GetInfo: handler(authorize, async () => info),
    Score: handler(authorize, score),
  });
}

function sized(bytes: Buffer, decode: (bytes: Buffer) => ScoreRequest__Output): Sized {
  try {
    return { ...decode(bytes), encodedBytes: bytes.length };
  } catch {
    return { items: [] };
  }
}

/** Refuse a malformed request before any sample is scored. */
function checkRequest({ items, encodedBytes = 0 }: Sized): void {
  const ids = items.map((item) => item.experience?.sampleId ?? "");
  let wrong = "";
  if (encodedBytes > MAX_REQUEST_BYTES) {
    wrong = `the request has ${encodedBytes} bytes; at most ${MAX_REQUEST_BYTES} fit: split it`;
  } else if (items.length < 1 || items.length > MAX_SAMPLES) {
    wrong = `the request has ${items.length} items; it must have 1 to ${MAX_SAMPLES}`;
  } else if (!ids.every((id) => ID.test(id))) {
    wrong = "a sample_id is not 1 to 128 characters of [A-Za-z0-9_-]";
  } else if (new Set(ids).size < ids.length) {
    wrong = "two items have the same sample_id";
  }
  if (wrong) throw new Refusal(grpc.status.INVALID_ARGUMENT, "INVALID_INPUT", wrong);
}

/** The end of a call: its caller left, or its deadline is near. */
class Limit {
  private readonly controller = new AbortController();
  private readonly timer: NodeJS.Timeout;
  readonly signal = this.controller.signal;
  readonly passed: Promise<never>;

  constructor(call: Call<unknown>) {
    const left = Math.max(Number(call.getDeadline()) - Date.now(), 0);
    this.timer = setTimeout(() => this.controller.abort(), left - Math.min(ANSWER_MARGIN_MS, left / 5));
    call.on("cancelled", () => this.controller.abort());
    this.passed = new Promise((_, reject) => {
      const error = new ScoreError("TIMEOUT", "the deadline of the call came before the score");
      this.signal.addEventListener("abort", () => reject(error));
    });
    this.passed.catch(() => undefined); // without a waiting sample, the rejection is no error
  }

  release(): void {
    clearTimeout(this.timer);
  }
}

/** Score one sample; every failure is an error of this sample. */
async function outcome(scorer: Scorer, item: Item, limit: Limit): Promise<SampleScore> {
  const sampleId = item.experience?.sampleId ?? "";
  try {
    if (item.verifier) throw new ScoreError("NOT_FOUND", `there is no verifier ${JSON.stringify(item.verifier)} here`);
    if (Buffer.byteLength(item.metadataJson) > MAX_METADATA_BYTES) {
      throw new ScoreError("BAD_METADATA", `metadata_json has more than ${MAX_METADATA_BYTES} bytes`);
    }
    const work = scorer.score(item, limit.signal);
    const found = work instanceof Promise ? await Promise.race([work, limit.passed]) : work;
    if ("abstain" in found) return { sampleId, abstainReason: found.abstain };
    if (![found.score, ...Object.values(found.components ?? {})].every((value) => Number.isFinite(Math.fround(value)))) {
      throw new ScoreError("NOT_FINITE", `the score ${found.score}, or a component, is no finite 32-bit number`);
    }
    return { sampleId, score: found.score, components: found.components };
  } catch (error) {
    const known = error instanceof ScoreError ? error : new ScoreError("RAISED", String(error));
    const message = known.message.replace(/[\p{C}\p{Z}]+/gu, " ").slice(0, 900); // one line of at most 1,000 characters
    return { sampleId, error: { code: CODES[known.reason], reason: known.reason, message } };
  }
}

/** Wrap a method: check caller and deadline, and turn exceptions into a status with details. */
function handler<Request, Response>(
  authorize: (call: Call<unknown>) => void,
  method: (request: Request, call: Call<unknown>) => Promise<Response>,
): grpc.handleUnaryCall<Request, Response> {
  return (call, done) => {
    const run = async (): Promise<Response> => {
      authorize(call);
      if (!Number.isFinite(Number(call.getDeadline()))) {
        throw new Refusal(grpc.status.INVALID_ARGUMENT, "NO_DEADLINE", "pass a deadline with the call");
      }
      return method(call.request, call as Call<unknown>);
    };
    run().then((response) => done(null, response), (error: unknown) => done(status(error)));
  };
}

/** Return the status of an error: code, text, and the details that programs read. */
function status(error: unknown): Partial<grpc.StatusObject> {
  if (!(error instanceof Refusal)) {
    console.error("a call failed:", error);
    return { code: grpc.status.INTERNAL, details: "internal error" };
  }
  const details: object[] = [any("google.rpc.ErrorInfo", { reason: error.reason, domain: "fourfold" })];
  if (error.retryMs) {
    const retryDelay = { seconds: Math.floor(error.retryMs / 1000), nanos: (error.retryMs % 1000) * 1e6 };
    details.push(any("google.rpc.RetryInfo", { retryDelay }));
  }
  const metadata = new grpc.Metadata();
  const bytes = encode("google.rpc.Status", { code: error.code, message: error.message, details });
  metadata.set("grpc-status-details-bin", bytes);
  return { code: error.code, details: error.message, metadata };
}

/** google.protobuf.Any of a message. */
function any(name: string, message: object): object {
  return { type_url: `type.googleapis.com/${name}`, value: encode(name, message) };
}
