// Samples from a rollout service and prints the tokens as they come.
//
//     node dist/sample.js 127.0.0.1:50060 1,2,3
//
// The second argument is the prompt as token ids: the rollout service has no text. See AgentService for messages.
import { randomUUID } from "node:crypto";

import type { GenerateResponse__Output } from "./gen/fourfold/rollout/v1/GenerateResponse.js";
import type { GetInfoResponse__Output } from "./gen/fourfold/rollout/v1/GetInfoResponse.js";
import {
  RolloutService, checkContract, connection, details, float32s, int32s, isServiceError, retrying, unary, within,
} from "./client.js";

async function main(target: string, prompt: number[]): Promise<void> {
  const client = new RolloutService(target, ...connection("rollout"));
  const info = await retrying(() =>
    unary<GetInfoResponse__Output>((done) => client.GetInfo({}, within(10), done)),
  );
  checkContract(info.contractVersion);
  console.log(`model ${info.model}, policy version ${info.policyVersion}`);

  let tokens = 0;
  let logprob = 0;
  let reason = "";
  const attempt = async (): Promise<void> => {
    const call = client.Generate(
      {
        requestId: randomUUID(), // one live request has one id: an attempt gets a new one
        promptTokenIds: prompt,
        samplingParams: { temperature: 1, maxTokens: 16, seed: 7 },
        flushInterval: { seconds: 0, nanos: 50_000_000 }, // without it, a sample comes once, when it is finished
      },
      within(60),
    );
    // Leaving the loop by an error cancels the call, which ends the sample in the engine.
    for await (const response of call as AsyncIterable<GenerateResponse__Output>) {
      for (const chunk of response.chunks) {
        const ids = int32s(chunk.tokenIds);
        tokens += ids.length;
        logprob += float32s(chunk.logprobs).reduce((sum, value) => sum + value, 0);
        reason = chunk.finishReason;
        console.log(`version ${chunk.policyVersion}: ${ids.join(" ")}`);
      }
    }
  };
  // After the first token, a repeated call would sample another completion.
  await retrying(attempt, () => tokens === 0);
  console.log(`${tokens} tokens, log-probability ${logprob.toFixed(3)}, ${reason}`);
  client.close();
}

const [target, ids] = process.argv.slice(2);
if (!target || !ids) {
  console.error("usage: node dist/sample.js HOST:PORT TOKEN_ID,TOKEN_ID,...");
  process.exit(2);
}
main(target, ids.split(",").map(Number)).catch((error: unknown) => {
  console.error(isServiceError(error) ? `sample: ${details(error).reason}: ${error.details}` : error);
  process.exit(1);
});
