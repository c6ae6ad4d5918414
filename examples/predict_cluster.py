"""Would fewer bits of the gradients pay on a cluster? A prediction from shapes, without a GPU.

    python examples/predict_cluster.py

Prints, with other numbers on another machine:

      compute        1004.4 ms  84.2 %
      data            188.9 ms  15.8 %
      gradients in none             1200.5 ms an iteration, 100.0 % of 16-bit bytes
      gradients in uniform:8,scale=group,group=128   1110.3 ms an iteration, 53.1 % of 16-bit bytes
"""

from commsweep.cli.main import main

if __name__ == "__main__":
    shape = "gpt:layers=24,hidden=2048,heads=16,seq=2048"
    parallel = [
        "--gpus",
        "64",
        "--tensor",
        "8",
        "--data",
        "8",
        "--micro-batch",
        "2",
        "--batch",
        "128",
    ]
    main(
        ["predict", "--model", shape, *parallel, "--codecs", "none;uniform:8,scale=group,group=128"]
    )
