"""`fourfold bench step`: training steps through `fourfold run`, and where their time goes."""
