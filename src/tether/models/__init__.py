"""Language models, adapters and heads: one base serves policy, reference, value and reward."""
