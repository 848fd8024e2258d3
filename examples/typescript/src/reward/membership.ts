// Membership of a run: registers the service at the coordinator and keeps its lease. docs/registration.md has the rules.
//
//            Register                     lease lost, or no answer
//   outside ----------> member ------------------------------------> outside
//     |  ^ back off       | KeepAlive after every third of the lease
//     +--+                +--> onDrain, when the coordinator asks for it
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import * as grpc from "@grpc/grpc-js";

import type { Duration__Output } from "../gen/google/protobuf/Duration.js";
import type { KeepAliveResponse__Output } from "../gen/fourfold/coordinator/v1/KeepAliveResponse.js";
import type { RegisterResponse__Output } from "../gen/fourfold/coordinator/v1/RegisterResponse.js";
import { DIRECT, MembershipService, isServiceError, unary, within } from "../client.js";

const CALL_SECONDS = 5;
const LEAVE_SECONDS = 0.5;
const FIRST_PAUSE_SECONDS = 0.2;
const MAX_PAUSE_SECONDS = 5;
// These never succeed later: another process has our place, the certificate or the recipe is wrong.
const PERMANENT = [
  grpc.status.INVALID_ARGUMENT, grpc.status.ALREADY_EXISTS, grpc.status.PERMISSION_DENIED, grpc.status.UNAUTHENTICATED,
  grpc.status.FAILED_PRECONDITION,
];

export interface Registration {
  coordinator: string;
  credentials: grpc.ChannelCredentials;
  options: grpc.ChannelOptions;
  memberId: string;
  /** Address at which the coordinator calls us. */
  target: string;
  /** Name of the table [[reward]] that we serve; empty: the first without addresses. */
  scorer: string;
  /** Called when the coordinator asks us to drain. */
  onDrain: () => void;
}

export class Membership {
  private readonly client: InstanceType<typeof MembershipService>;
  private readonly incarnation = randomUUID().replaceAll("-", ""); // a new process is a new incarnation
  private readonly end = new AbortController();
  private lease?: Buffer;
  private ttlSeconds = 0;
  private failures = 0;
  private running?: Promise<void>;

  constructor(private readonly registration: Registration) {
    // After a failed connection, grpc-js would wait up to two minutes before it tries again.
    const backoff = { "grpc.initial_reconnect_backoff_ms": 500, "grpc.max_reconnect_backoff_ms": 5000 };
    const calls = { "grpc.keepalive_time_ms": 20_000, "grpc.enable_retries": 0 };
    const options = { ...registration.options, ...DIRECT, ...backoff, ...calls };
    this.client = new MembershipService(registration.coordinator, registration.credentials, options);
  }

  /** Stay a member until `leave`; throw the error with which the coordinator will never accept us. */
  run(): Promise<void> {
    this.running = this.loop();
    return this.running;
  }

  /** Give the lease back, so that no further sample is sent to us. An error is no harm: the lease expires. */
  async leave(): Promise<void> {
    this.end.abort();
    // A registration in progress may still get a lease.
    await Promise.race([this.running?.catch(() => undefined), sleep(LEAVE_SECONDS * 1000)]);
    if (this.lease) {
      const request = { leaseToken: this.lease };
      await unary((done) => this.client.Deregister(request, within(LEAVE_SECONDS), done)).catch(() => undefined);
    }
    this.client.close();
  }

  private async loop(): Promise<void> {
    while (!this.end.signal.aborted) {
      let pause: number;
      try {
        await (this.lease ? this.renew(this.lease) : this.register());
        this.failures = 0;
        pause = this.ttlSeconds / 3;
      } catch (error) {
        pause = this.afterFailure(error);
      }
      await sleep(pause * 1000, undefined, { signal: this.end.signal }).catch(() => undefined);
    }
  }

  private async register(): Promise<void> {
    const { memberId, target, scorer, coordinator } = this.registration;
    const request = { memberId, incarnation: this.incarnation, role: "ROLE_REWARD", target, scorer } as const;
    const response = await unary<RegisterResponse__Output>((done) =>
      this.client.Register(request, within(CALL_SECONDS), done),
    );
    this.ttlSeconds = seconds(response.ttl);
    this.lease = response.leaseToken;
    console.error(`registered at ${coordinator} as ${memberId} at ${target}, for ${this.ttlSeconds} s`);
  }

  private async renew(leaseToken: Buffer): Promise<void> {
    const deadline = within((2 * this.ttlSeconds) / 3); // what is left of the lease
    const response = await unary<KeepAliveResponse__Output>((done) =>
      this.client.KeepAlive({ leaseToken }, deadline, done),
    );
    this.ttlSeconds = seconds(response.ttl);
    if (response.drainRequested) this.registration.onDrain();
  }

  /** Drop the lease; return the seconds until the next registration, which renews a lease that still exists. */
  private afterFailure(error: unknown): number {
    if (!isServiceError(error) || PERMANENT.includes(error.code)) throw error;
    const wasMember = this.lease !== undefined;
    this.lease = undefined;
    this.failures += 1;
    if (wasMember || this.failures === 1) {
      // The first failure of a series, which may last for hours.
      console.error(`${wasMember ? "lost the lease" : "not registered"}; trying again: ${error.message}`);
    }
    if (wasMember && error.code === grpc.status.NOT_FOUND) return 0; // the coordinator is there, and may be a new one
    const pause = Math.min(FIRST_PAUSE_SECONDS * 2 ** Math.min(this.failures - 1, 10), MAX_PAUSE_SECONDS);
    return pause * (0.5 + Math.random() / 2);
  }
}

function seconds(ttl: Duration__Output | null): number {
  const value = ttl ? ttl.seconds + ttl.nanos / 1e9 : 0;
  if (!(value > 0)) throw new Error(`the coordinator granted a lease of ${value} s; it must be above 0`);
  return value;
}
