"""The store shown elsewhere: Weights & Biases, Optuna's dashboard. Views, never the record."""
