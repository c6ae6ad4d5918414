"""The same Run as real processes: one a stage, on torch.distributed.pipelining, packed payloads between them."""
