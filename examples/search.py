"""An Optuna search: which codec of four at each boundary, within a fifth of the dense bytes?

    python examples/search.py

Prints, with other numbers on another machine:

    best: {'activations': 'ef+topk:0.1', 'gradients': 'uniform:4'}
    accuracy 0.125, 12.5 % of the dense bytes
"""

import optuna

import commsweep as cs
from commsweep.config import override
from commsweep.launching import codecs

CODECS = ["topk:0.1", "ef+topk:0.1", "uniform:2", "uniform:4"]
BUDGET = 0.2  # of the dense bytes

if __name__ == "__main__":
    base = cs.preset("synthetic")

    def objective(trial):
        """Return the accuracy of a training with the codecs that the trial chooses."""
        settings = {}
        for role in ("activations", "gradients"):
            codec, feedback = codecs.separated(trial.suggest_categorical(role, CODECS))
            settings |= codecs.changes(role, codec, feedback)
        row = cs.run(override(base, settings), store="out/example_store")
        share = row["bytes"]["ratio"]
        trial.set_user_attr("share", share)
        return row["metrics"]["val_on_acc"] if share <= BUDGET else -share

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=6)
    best = study.best_trial
    print(f"best: {best.params}")
    print(f"accuracy {best.value:.3f}, {100 * best.user_attrs['share']:.1f} % of the dense bytes")
