// What is scored, and how: replace this file by your own scorer.
import { ScoreError, type Item, type Outcome } from "./service.js";

/** Name and version, which the run records with every sample. Change the version when equal samples get other scores. */
export const NAME = "short-is-better@1";

/** Whether the outcome depends on the item alone, ids left out: the coordinator may then use the score of an equal one. */
export const PURE = true;

const MAX_CHARACTERS = 1000;

/**
 * Score one sample: 1 for an empty completion, 0 for `max_characters` of its metadata (1000) or more.
 *
 * The function may be asynchronous; `signal` is aborted when the caller needs no answer any more. Never return 0 for a
 * sample that could not be judged: return an abstention, and the sample is dropped, or throw, and it is scored again.
 */
export function score(item: Item, _signal: AbortSignal): Outcome | Promise<Outcome> {
  const limit = metadata(item)["max_characters"] ?? MAX_CHARACTERS;
  if (typeof limit !== "number" || !(limit >= 1)) {
    throw new ScoreError("BAD_METADATA", `max_characters is ${JSON.stringify(limit)}; it must be a number of 1 or more`);
  }
  if (item.completionText.includes("\0")) return { abstain: "NOT_A_TEXT" };
  const characters = Array.from(item.completionText).length; // code points, not UTF-16 units
  return { score: Math.max(0, 1 - characters / limit), components: { characters } };
}

/** Return the other fields of the task: an object, {} if the task has none. */
function metadata(item: Item): Record<string, unknown> {
  if (!item.metadataJson) return {};
  let value: unknown;
  try {
    value = JSON.parse(item.metadataJson);
  } catch {
    value = undefined;
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new ScoreError("BAD_METADATA", "metadata_json is no JSON object");
  }
  return value as Record<string, unknown>;
}
