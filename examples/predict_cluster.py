"""Would fewer bits of the gradients pay on a cluster? A prediction from shapes, without a GPU.

    python examples/predict_cluster.py

Prints, with other numbers on another machine:

      compute        1004.4 ms  84.2 %
      data            188.9 ms  15.8 %
      gradients in none             1193.3 ms an iteration, 100.0 % of 16-bit bytes, by ring
      gradients in uniform:8        1107.2 ms an iteration, 50.0 % of 16-bit bytes, by alltoall
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
    main(["predict", "--model", shape, *parallel, "--codecs", "none;uniform:8"])
