"""Commands, one group per file; loaded only when called, so that `batten --help` is instant."""
