"""What is learnt from runs and from exact languages: studies above the loop, below the commands."""
