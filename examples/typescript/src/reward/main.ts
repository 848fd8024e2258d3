// A complete reward service: scores by address, or as a member of a run.
//
//     node dist/reward/main.js 127.0.0.1:50053
//
// score.ts has the scorer, service.ts the rules of the contract, membership.ts the registration, security.ts TLS.
import { parseArgs } from "node:util";
import * as grpc from "@grpc/grpc-js";
import { HealthImplementation } from "grpc-health-check";

import { details, isServiceError } from "../client.js";
import { Membership } from "./membership.js";
import { NAME, PURE, score } from "./score.js";
import { Security } from "./security.js";
import { SERVICE, addRewardService } from "./service.js";

const USAGE =
  "usage: node dist/reward/main.js HOST:PORT [--certs DIR] [--member-id NAME]\n" +
  "           [--coordinator HOST:PORT [--scorer NAME] [--advertise HOST]]";
const MAX_MESSAGE_BYTES = 16 << 20;
const GRACE_MS = 1000; // of calls in progress

interface Settings {
  listen: string;
  certs: string;
  memberId: string;
  coordinator: string;
  scorer: string;
  advertise: string;
}

function settings(): Settings {
  const text = { type: "string", default: "" } as const;
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      certs: text, coordinator: text, scorer: text, advertise: text, "member-id": { type: "string", default: "reward-0" },
    },
  });
  const [listen] = positionals;
  if (!listen || positionals.length > 1) throw new Error("give one address, HOST:PORT");
  const { certs, coordinator, scorer, advertise } = values;
  const host = listen.slice(0, listen.lastIndexOf(":"));
  if (!certs && !["127.0.0.1", "[::1]", "localhost"].includes(host)) {
    throw new Error(`${listen}: without --certs everybody could call it; listen on 127.0.0.1`);
  }
  if (coordinator && !advertise && ["0.0.0.0", "[::]"].includes(host)) {
    throw new Error(`${listen} is every address of this machine; give the one that the coordinator dials: --advertise`);
  }
  return { listen, certs, memberId: values["member-id"], coordinator, scorer, advertise: advertise || host };
}

async function serve(options: Settings): Promise<void> {
  const security = options.certs ? new Security(options.certs, options.memberId) : undefined;
  const server = new grpc.Server({
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
  });
  const health = new HealthImplementation({ "": "SERVING", [SERVICE]: "SERVING" });
  health.addToServer(server);
  addRewardService(server, { name: NAME, pure: PURE, score }, (call) => security?.authorize(call));
  const credentials = security?.server() ?? grpc.ServerCredentials.createInsecure();
  const port = await new Promise<number>((resolve, reject) => {
    server.bindAsync(options.listen, credentials, (error, bound) => (error ? reject(error) : resolve(bound)));
  });
  const target = `${options.advertise}:${port}`;
  console.log(`READY ${target}`);

  let drain: () => void = () => undefined;
  const stopped = new Promise<void>((resolve) => (drain = resolve));
  let signals = 0;
  for (const name of ["SIGTERM", "SIGINT"] as const) {
    process.on(name, () => (signals++ ? process.exit(1) : drain())); // the second one ends the process at once
  }
  let membership: Membership | undefined;
  if (options.coordinator) {
    const [dial, extra] = security?.coordinator() ?? [grpc.credentials.createInsecure(), {}];
    membership = new Membership({ ...options, credentials: dial, options: extra, target, onDrain: drain });
  }
  try {
    await Promise.race([stopped, membership?.run().then(() => stopped) ?? stopped]);
  } finally {
    health.setStatus(SERVICE, "NOT_SERVING");
    await membership?.leave(); // first, so that the coordinator sends nothing more
    await shutdown(server);
  }
}

/** Refuse new calls, and end those in progress after a grace. */
function shutdown(server: grpc.Server): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(() => {
      server.forceShutdown();
      resolve();
    }, GRACE_MS);
    server.tryShutdown(() => {
      clearTimeout(timer);
      resolve();
    });
  });
}

function fail(code: number, text: string): never {
  console.error(`reward: ${text}`);
  process.exit(code);
}

let options: Settings;
try {
  options = settings();
} catch (error) {
  fail(2, `${(error as Error).message}\n${USAGE}`);
}
serve(options).then(
  () => process.exit(0),
  (error: unknown) =>
    fail(1, isServiceError(error) ? `${details(error).reason}: ${error.details}` : ((error as Error).message ?? String(error))),
);
