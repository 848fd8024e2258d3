// An agent of a gateway: leases tasks of a run, answers each with the policy, and rewards the answer itself.
//
//     node dist/agent.js 127.0.0.1:50070
//
// It is for the tasks of recipes/agents_external.toml: products of two numbers. It ends when the run has no more tasks.
import { randomUUID } from "node:crypto";
import * as grpc from "@grpc/grpc-js";

import type { AgentServiceClient } from "./gen/fourfold/agent/v1/AgentService.js";
import type { CloseSessionResponse__Output } from "./gen/fourfold/agent/v1/CloseSessionResponse.js";
import type { GenerateResponse__Output } from "./gen/fourfold/agent/v1/GenerateResponse.js";
import type { GetInfoResponse__Output } from "./gen/fourfold/agent/v1/GetInfoResponse.js";
import type { NextTaskResponse__Output } from "./gen/fourfold/agent/v1/NextTaskResponse.js";
import type { OpenSessionResponse__Output } from "./gen/fourfold/agent/v1/OpenSessionResponse.js";
import type { Task__Output } from "./gen/fourfold/agent/v1/Task.js";
import { AgentService, checkContract, connection, details, isServiceError, retrying, unary, within } from "./client.js";

// Tasks at a time. An engine samples many turns in little more time than one.
const WORKERS = 32;
const WAIT_SECONDS = 10;
let played = 0;
let rewarded = 0;

/** Return 1 if the last number of the text is the answer, else 0. */
function reward(text: string, answer: string): number {
  const numbers = text.match(/-?\d+/g) ?? [];
  return numbers.at(-1) === answer.trim() ? 1 : 0;
}

/** Sample one turn; return its text. The request id makes a repetition safe: the gateway returns the stored turn. */
async function turn(client: AgentServiceClient, sessionId: string, task: Task__Output): Promise<string> {
  const requestId = randomUUID();
  return retrying(async () => {
    let text = "";
    const prompt = task.messages.length ? { chat: { messages: task.messages } } : { text: task.text };
    const call = client.Generate({ sessionId, requestId, ...prompt }, within(120));
    for await (const response of call as AsyncIterable<GenerateResponse__Output>) {
      for (const chunk of response.chunks) text += chunk.text;
    }
    return text;
  });
}

async function play(client: AgentServiceClient, task: Task__Output): Promise<void> {
  const sessionId = randomUUID();
  await retrying(() =>
    unary<OpenSessionResponse__Output>((done) => client.OpenSession({ sessionId, taskId: task.taskId }, within(10), done)),
  );
  let outcome: { reward: number } | { abandonReason: string };
  try {
    outcome = { reward: reward(await turn(client, sessionId, task), task.answer) };
  } catch (error) {
    console.error(`task ${task.taskId}: ${String(error)}`);
    outcome = { abandonReason: "AGENT_FAILED" };
  }
  // Idempotent: the same outcome again gets the same response.
  await retrying(() =>
    unary<CloseSessionResponse__Output>((done) => client.CloseSession({ sessionId, ...outcome }, within(30), done)),
  );
  if ("reward" in outcome) {
    played++;
    rewarded += outcome.reward;
  }
}

/** Play tasks until the run has no more: NextTask then fails with FAILED_PRECONDITION. */
async function work(client: AgentServiceClient): Promise<void> {
  for (;;) {
    let task: Task__Output | null;
    try {
      // Not idempotent, but safe to repeat: the lease of a task whose response was lost ends by itself.
      const next = await retrying(() =>
        unary<NextTaskResponse__Output>((done) =>
          client.NextTask({ wait: { seconds: WAIT_SECONDS } }, within(WAIT_SECONDS + 5), done),
        ),
      );
      task = next.task;
    } catch (error) {
      if (isServiceError(error) && error.code === grpc.status.FAILED_PRECONDITION) return;
      throw error;
    }
    if (!task) continue;
    try {
      await play(client, task);
    } catch (error) {
      // The session expired, or the run took the task back. Other tasks go on.
      if (!isServiceError(error) || !NOT_FATAL.has(error.code)) throw error;
      console.error(`task ${task.taskId}: ${details(error).reason}: ${error.details}`);
    }
  }
}
const NOT_FATAL = new Set([grpc.status.NOT_FOUND, grpc.status.FAILED_PRECONDITION, grpc.status.DEADLINE_EXCEEDED]);

async function main(target: string): Promise<void> {
  const client = new AgentService(target, ...connection("gateway"));
  const info = await retrying(() =>
    unary<GetInfoResponse__Output>((done) => client.GetInfo({}, within(10), done)),
  );
  checkContract(info.contractVersion);
  console.log(`model ${info.model}, run ${info.runName || "(none)"}`);
  await Promise.all(Array.from({ length: WORKERS }, () => work(client)));
  console.log(`${played} tasks, mean reward ${(rewarded / Math.max(played, 1)).toFixed(3)}`);
  client.close();
}

const [target] = process.argv.slice(2);
if (!target) {
  console.error("usage: node dist/agent.js HOST:PORT");
  process.exit(2);
}
main(target).catch((error: unknown) => {
  console.error(isServiceError(error) ? `agent: ${details(error).reason}: ${error.details}` : error);
  process.exit(1);
});
