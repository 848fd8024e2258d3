"""`fourfold bench rollout`: a rollout service, called over gRPC from other processes, against vLLM's `LLM.generate`."""
