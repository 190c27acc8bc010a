"""Files that a script reads and writes: checkpoints and published weights."""
