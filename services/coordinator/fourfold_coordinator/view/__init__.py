"""Shows runs in a browser: `fourfold view` (docs/view.md). Pages are rendered here; no page writes to a run."""
