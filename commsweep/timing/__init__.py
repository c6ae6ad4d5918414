"""Step times: predicted from measurements, and measured on shaped links."""

# Of `gpt.Choices`, here because the command line names them before anything else is imported.
SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "2bw")
COLLECTIVES = ("ring", "tree", "alltoall", "hierarchical", "nccl")
