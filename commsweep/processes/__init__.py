"""The same Run as real processes: one a stage of a pipeline, or one a learner."""
