"""Work on texts of callers, in processes that can be killed: vLLM's parsers and the compilation of grammars."""
