"""The mathematics: tensors in, tensors out. No models, no files, no configuration."""
