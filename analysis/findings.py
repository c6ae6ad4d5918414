"""The questions of docs/findings.md, in its order; answers and numbers come from the recorded
claims.
"""

from __future__ import annotations

from commsweep.reporting.findings import Finding

FINDINGS = [
    Finding(
        "1",
        "What is a message between pipeline stages worth, and what do codecs keep of it?",
        (
            ("floor_optimizers", "Z11"),
            ("floor_optimizers", "Z12"),
            ("floor_optimizers", "Z13"),
            ("floor_warm", "Z16"),
            ("floor_warm", "Z17"),
            ("floor_finetune", "Z14"),
            ("floor_finetune", "Z15"),
            ("floor_text", "Z1"),
            ("floor_text", "Z2"),
            ("floor_text", "Z3"),
            ("floor_text", "Z7"),
            ("floor_gru", "Z2"),
            ("floor_gru", "Z7"),
            ("floor_gru", "Z8"),
            ("floor_digits", "Z2"),
            ("floor_digits", "Z5"),
            ("floor_length", "Z1"),
            ("floor_length", "Z2"),
            ("floor_sgd", "Z10"),
            ("text_length", "S1"),
            ("text_length", "S2"),
        ),
        "commsweep sweep launch floor_optimizers && commsweep report floor_optimizers --papers "
        "floor",
        "anything of larger models or of more than 400 steps. A training that ends no better than "
        "the frequencies of letters has collapsed, and by how much it is worse than nothing says "
        "nothing. 400 steps of SGD are so few that dense itself does not gain on nothing: cannot "
        "tell.",
        "floor_optimizers/worth_kept.png",
        "worth kept by codec with AdamW and with Muon: dense at 100 percent, nothing sent at 0",
        answer="It depends on the optimizer, the direction and the model. A nano GPT-2 from "
        "scratch, 400 steps with AdamW at dense's best rate, n = 5: as gradients two EDEN bits "
        "keep {floor_optimizers/worth/gradients: EDEN 2 bit (optim adamw)}, two unbiased min-max "
        "bits {floor_optimizers/worth/gradients: min-max 2 bit, group scale, stochastic (optim "
        "adamw)}; TopK 10 % collapses. As activations two EDEN bits keep "
        "{floor_optimizers/worth/activations: EDEN 2 bit (optim adamw)}, and TopK 10 % "
        "collapses. With Muon TopK 10 % keeps "
        "{floor_optimizers/worth/activations: TopK 10 % (optim muon)} of activations and "
        "{floor_optimizers/worth/gradients: TopK 10 % (optim muon)} of gradients. After 200 dense "
        "steps TopK 10 % of gradients still loses {floor_warm/Z16/0/nats} to sending nothing with "
        "AdamW; with Muon it gains {floor_warm/Z17/0}. Fine-tuning SmolLM2-135M, 40 steps: TopK "
        "10 % keeps {floor_finetune/worth/gradients: TopK 10 %} of gradients, n = 3; of "
        "activations it ends {floor_finetune/Z15/0/nats} above the untouched model.",
        overturn="a GPT-2 of any size, trained from scratch with AdamW, in which TopK 10 % of "
        "these gradients beats sending nothing.",
    ),
    Finding(
        "2",
        "Does a setting that looks nearly free in a short training stay so?",
        (("text_length", "S3"), ("text_recipe", "F3b"), ("floor_length", "Z4")),
        "commsweep sweep launch floor_length && commsweep report floor_length --papers floor",
        "anything beyond 1,600 steps of one model, three seeds. The activations alone, with dense "
        "gradients, collapsed in one seed of three.",
        "text_recipe/fronts.png",
        "nats lost against bytes after 100 steps, by direction",
        answer="One that we recommended did not: TopK 20 % in 4 bits forward, and back the "
        "gradient at the same positions in 2 unbiased bits. On a nano GPT-2 it loses "
        "{text_recipe/F3b/0/nats} after 100 steps, and {text_length/S3/0} after 1,600.",
        overturn="a longer training in which the loss falls again.",
    ),
    Finding(
        "3",
        "Does training with TopK spoil inference without compression?",
        (
            ("cifar_small_jpeg", "C3"),
            ("image_recalibrated", "S5"),
            ("demo", "C3"),
            ("demo", "S5"),
        ),
        "make demo && commsweep sweep launch image_recalibrated --data-root FOLDER && commsweep "
        "report image_recalibrated",
        "networks without BatchNorm: a GPT-2 loses less there from the start.",
        "demo/recalibrated.png",
        "accuracy with compression on, off, and off after recalibration, digits",
        answer="Mostly BatchNorm's statistics do. On 10,000 JPEG copies of CIFAR-10 images, 8 "
        "epochs of a ResNet of width 16, TopK 10 % both ways: dense inference is "
        "{cifar_small_jpeg/C3/0/points} worse than compressed inference. With statistics of 50 "
        "dense batches {image_recalibrated/S5/0/points} remain. On digits with TopK 10 % dense "
        "inference is then no worse ({demo/S5/1/points} better).",
        overturn="a network with BatchNorm that gains nothing from recalibration.",
    ),
    Finding(
        "4",
        "What does exchanging every tenth step cost, and is it the same with Muon inside?",
        (("local_methods", "L8"), ("local_methods", "L1"), ("local_methods", "L3")),
        "commsweep sweep launch local_methods && commsweep report local_methods --papers local",
        "anything beyond 200 steps of a nano GPT-2; rates were tuned on a grid and one seed.",
        "local_methods/bytes_up.png",
        "test perplexity against bytes a learner sends up a step, by method",
        answer="A nano GPT-2, 200 steps, four learners: with AdamW inside, uncompressed, it "
        "costs {local_methods/L8/0/nats} beside plain AdamW. With Muon inside it costs "
        "{local_methods/L8/2} beside plain Muon, which ends far lower, and in two bits "
        "{local_methods/L8/1}.",
        overturn="a longer training in which MuLoCo comes within 0.1 nats of plain Muon.",
    ),
    Finding(
        "5",
        "Does a learning rate of its own save a biased gradient?",
        (("text_rates", "S6"), ("floor_rates", "S6"), ("floor_rates", "Z9")),
        "commsweep sweep launch floor_rates && commsweep report floor_rates --papers floor,ladders",
        "how it is after more than 400 steps; three seeds judge. Each best rate lies inside the "
        "rates that floor_rates tries.",
        "floor_rates/rates.png",
        "test loss against learning rate: dense, nothing sent, TopK with error feedback",
        answer="It does not save TopK 10 % on a nano GPT-2 of 400 steps with AdamW. Each at the "
        "rate that a held-out seed chose, TopK with error feedback loses {floor_rates/S6/0/nats} "
        "to dense. It loses {floor_rates/Z9/0} to sending nothing. Without feedback it loses "
        "{text_rates/S6/1}, and two unbiased bits lose {text_rates/S6/2}.",
        overturn="a rate at which TopK comes within 0.1 nats of dense at its best rate.",
    ),
    Finding(
        "6",
        "Is what compression loses on images only training time?",
        (("image_length", "S4"), ("image_length", "S3")),
        "commsweep sweep launch image_length --data-root FOLDER && commsweep report image_length",
        "how trainings of more than 24 epochs end.",
        "image_length/lasting.png",
        "what each setting loses against the number of epochs",
        answer="Not of TopK 10 % on 10,000 JPEG copies of CIFAR-10 images: from 8 to 24 epochs its "
        "loss grew by {image_length/S4/0/points} with each doubling. Of EF21 and of TopK 20 % "
        "behind a shared mask three seeds decide nothing.",
        overturn="a longer training in which TopK comes within 2 points of dense.",
    ),
    Finding(
        "F1",
        "Do gradients need milder compression than activations, or unbiased compression?",
        tuple(("text_bias", f"F1{letter}") for letter in "acdefg"),
        "commsweep sweep launch text_bias --diagnose && commsweep report text_bias --papers bias",
        "anything of images or of SGD (the next finding), of longer trainings, or of larger "
        "models; groups of 32 and 128 scatter much over seeds under nearest rounding.",
        "text_bias/error_and_harm.png",
        "nats lost over the relative error of the gradient's message, by bias",
        answer="On a nano GPT-2 gradients need codes without bias: two bits in groups of 128 "
        "save {text_bias/F1c/0/nats} when rounded stochastically instead of to "
        "nearest. Activations do not: there it costs {text_bias/F1d/1}. Error feedback "
        "does not cure TopK 10 % of gradients ({text_bias/F1g/1/nats} saved).",
        overturn="a seed-paired repetition in which nearest rounding at one range a batch costs "
        "no more than stochastic rounding.",
    ),
    Finding(
        "F1, images",
        "Is it the same on images, with SGD and with AdamW?",
        tuple(("cifar_bias_jpeg", f"F1{letter}") for letter in "abdefghi"),
        "commsweep sweep launch cifar_bias_jpeg --diagnose && commsweep report cifar_bias_jpeg "
        "--papers bias",
        "much where effects are small: settings have three to fourteen seeds, and all effects "
        "are tested together. The images are a JPEG copy of CIFAR-10.",
        "cifar_bias_jpeg/error_and_harm.png",
        "points lost over the relative error of the gradient's message",
        answer="Where one range serves the batch, yes: two unbiased bits gain "
        "{cifar_bias_jpeg/F1a/0/points} with SGD and {cifar_bias_jpeg/F1a/1} with "
        "AdamW. With a range for 128 entries it is undecided. Beside TopK 5 % they gain"
        " {cifar_bias_jpeg/F1e/0} and {cifar_bias_jpeg/F1e/1}.",
        overturn="the same settings with other seeds in which codes without bias win under fine "
        "scales, too.",
    ),
    Finding(
        "C8",
        "Is the shared mask a thing of its own, or the same?",
        (("demo-text", "C8"), ("text_bias", "F1i")),
        "commsweep sweep launch demo-text && commsweep report demo-text",
        "whether an unbiased mask of the gradient's own would do.",
        answer="A nano GPT-2 from scratch needs it: with TopK 20 % separate masks lose {demo-"
        "text/C8/0/nats} more than the shared one after 100 steps. A dense gradient "
        "behind sparse activations is no better than a mask of its own "
        "({text_bias/F1i/1/nats}).",
        overturn="a mask of the gradient's own, without bias, that comes within 0.1 nats of the "
        "shared one.",
    ),
    Finding(
        "C7, C8, fine-tuning",
        "What of it holds for SmolLM2-135M, fine-tuned on WikiText-2?",
        (("wikitext_small", "C7"), ("wikitext_small", "C8")),
        "commsweep sweep launch wikitext_small --threads 1 && commsweep report wikitext_small "
        "--papers text",
        "how it is after more than 40 steps: weights that were trained without compression meet "
        "it for the first time. Trained from scratch, a nano GPT-2 needs the shared mask (C8 "
        "above).",
        answer="More than from scratch: 40 steps with TopK 20 % lose {wikitext_small/C7/0/nats} "
        "to dense, and with 30 % {wikitext_small/C7/1}. Separate masks lose no "
        "more than the shared one.",
        overturn="a fine-tuning of more steps in which separate masks lose no more than the "
        "shared one.",
    ),
    Finding(
        "F3",
        "What to send forward, and what back, at equal bytes?",
        tuple(
            (name, claim)
            for name in ("text_recipe", "cifar_recipe_jpeg")
            for claim in ("F3a", "F3b", "F3c")
        ),
        "commsweep sweep launch text_recipe --diagnose && commsweep report text_recipe --papers "
        "recipe",
        "which pairs are best at other lengths; on images, where every pair of few bytes loses "
        "more, three to sixteen seeds were run, and fewer pairs "
        "(results/cifar_recipe_jpeg/tables.md).",
        "text_recipe/fronts.png",
        "nats lost against bytes, forward alone, backward alone and both ways",
        answer="After 100 steps of a nano GPT-2, 4 bits forward and 2 unbiased bits back lose "
        "{text_recipe/F3a/0/nats}. On 10,000 JPEG copies of CIFAR-10 images, 8 epochs,"
        " they lose {cifar_recipe_jpeg/F3a/0/points}, and TopK 20 % in 4 bits with its"
        " mask in 2 bits back {cifar_recipe_jpeg/F3b/0}.",
        overturn="a longer training, which has overturned the pair recommended for text already "
        "(answer 2).",
    ),
    Finding(
        "F4",
        "Which error feedback makes dense inference lossless, and why does a memory keyed by "
        "slot harm?",
        tuple(("cifar_recipe_jpeg", f"F4{letter}") for letter in "abc"),
        "commsweep sweep launch cifar_recipe_jpeg --diagnose && commsweep report "
        "cifar_recipe_jpeg --papers recipe",
        "how it is after a hundred epochs: the paper's ResNet-18 sees each image more than ten "
        "times as often.",
        answer="None of them on 10,000 JPEG copies of CIFAR-10 images, 8 epochs, TopK 10 %: "
        "dense inference loses {cifar_recipe_jpeg/F4a/1/points} under EF21 by sample, "
        "and {cifar_recipe_jpeg/F4a/3} under EF by sample. By slot a message is more "
        "residue than activation.",
        overturn="a memory keyed by slot that does no harm on a set with more than a few "
        "hundred batches.",
    ),
    Finding(
        "U1",
        "Links differ: is a ratio for each link better than one everywhere?",
        (("unequal_ratios", "U1"),),
        "commsweep sweep launch unequal_ratios && commsweep report unequal_ratios --papers unequal",
        "that there is no gain where links are more, or differ by latency; steps of the same "
        "seconds were predicted and then measured (docs/guide/pipelines.md).",
        answer="Undecided on a nano GPT-2 at the same predicted step time: four mixtures save "
        "at most {unequal_ratios/U1/1/nats} over one ratio everywhere.",
        overturn="links that differ more than these, on which one ratio everywhere is as good.",
    ),
    Finding(
        "A1-A4",
        "What of AdaComp (arXiv 1712.02679) holds on small networks?",
        tuple(("demo-gradients", f"A{number}") for number in range(1, 5)),
        "make demo-gradients",
        "anything of networks that are not small; four learners, three to eight seeds.",
        "demo-gradients/scaling.png",
        "bytes a learner sends a step by number of learners, dense and AdaComp",
        answer="Rates as claimed on digits: AdaComp sends {demo-gradients/A1/0} times fewer "
        "values of convolutions and loses {demo-gradients/A1/1/points} on a small "
        "ResNet. On a nano GPT-2 it loses {demo-gradients/A2/3/nats}.",
        overturn="the paper's networks at its learning rates, with a loss where it reports none.",
    ),
    Finding(
        "K",
        "What do K-FAC's factors bear, and what does SPD-KFAC (arXiv 2107.06533) gain?",
        tuple(("demo-kfac", f"K{number}") for number in range(1, 7)),
        "make demo-kfac",
        "anything of large networks or of GPUs; predictions for 64 GPUs rest on published "
        "constants, and two cores measured the steps.",
        "demo-kfac/factor_bytes.png",
        "test error against the bytes of K-FAC's factors, a perceptron and a small ResNet",
        answer="On digits factors in 8 bits lose {demo-kfac/K5/0/points} of accuracy on a "
        "perceptron, and {demo-kfac/K5/4} on a small ResNet. In 4 bits the perceptron loses "
        "{demo-kfac/K5/1}: its factors can no longer be inverted. None of the steps that were "
        "measured here gains the ten percent that are claimed.",
        overturn="eight bits that lose a point on a larger network; measured steps of a cluster "
        "that gain as published.",
    ),
    Finding(
        "M1-M5",
        "What of Mixed Sparsity Training (arXiv 2408.11746) holds for a nano GPT-2?",
        (
            *(("demo-sparse", f"M{number}") for number in range(1, 6)),
            *(("sparse-long", f"M{number}") for number in range(1, 5)),
        ),
        "make demo-sparse && commsweep sweep launch sparse-long",
        "how it is at the paper's size; 240 steps (demo-sparse) and 2,000 (sparse-long).",
        "sparse-long/front.png",
        "loss against FLOPs",
        answer="Not at this size. At a quarter of the dense FLOPs MST ends {demo-sparse/M1/0/nats} "
        "above dense after 240 steps, and {sparse-long/M1/0} after 2,000.",
        overturn="a larger model in which MST comes within 0.02 nats of dense.",
    ),
    Finding(
        "L",
        "How rarely, and in how few bits, may learners exchange?",
        tuple(("local_methods", f"L{number}") for number in (2, 4, 5, 6, 7)),
        "commsweep sweep launch local_methods && commsweep report local_methods --papers local",
        "anything beyond 200 steps of a nano GPT-2; rates were tuned on a grid and one seed. "
        "With Muon inside, plain training ends far lower than with AdamW, and learners that "
        "meet rarely lose more of that.",
        "local_methods/bytes_up.png",
        "test perplexity against bytes a learner sends up a step, by method",
        answer="On a nano GPT-2 of 200 steps an exchange of few values every step (SparseLoCo)"
        " ends {local_methods/L2/0/nats} below a full one every 100 steps (DiLoCo). "
        "DeMo without its transform loses {local_methods/L7/0/nats}.",
        overturn="a training of more than 200 steps in which the methods change their order.",
    ),
    Finding(
        "F5",
        "Do the losses of boundaries and of learners' gradients add?",
        (("text_recipe", "F5"), ("cifar_recipe_jpeg", "F5")),
        "commsweep sweep launch text_recipe --diagnose && commsweep report text_recipe --papers "
        "recipe",
        "where losses are small: AdaComp alone loses 0.6 nats on text, near what a gradient "
        "that says nothing loses. On images what both lose lies near the sum "
        "(results/cifar_recipe_jpeg/tables.md), but three seeds scatter by points.",
        answer="Not always: on a nano GPT-2 TopK 10 % at the boundaries and AdaComp between "
        "learners lose {text_recipe/F5/2/nats} less together than the sum of each. All"
        " other pairs are undecided.",
        overturn="one pair of compressors whose losses together exceed their sum by more than "
        "the margin.",
    ),
    Finding(
        "C1-C6, F2, middle scale",
        "What of it holds on 10,000 CIFAR-10 images (a JPEG copy)?",
        tuple(
            ("cifar_small_jpeg", name)
            for name in (
                "C1, 2 bit",
                "C1, 4 bit",
                "C1-group, 2 bit",
                "C1-group, 4 bit",
                "C2",
                "C3",
                "C4",
                "C5",
                "C6",
                "F2",
            )
        ),
        "commsweep sweep launch cifar_small_jpeg --diagnose && commsweep report "
        "cifar_small_jpeg --papers images",
        "how ResNet-18 on all of CIFAR-10 does; three to eleven seeds, a ResNet of width 16, "
        "eight epochs. Error feedback is keyed by slot there, as in the paper.",
        "cifar_small_jpeg/score_k.png",
        "test accuracy against K, with each feedback, both kinds of inference",
        answer="A ResNet of width 16, 8 epochs: TopK 10 % both ways loses "
        "{cifar_small_jpeg/C2/0/points}. Under compressed inference EF loses "
        "{cifar_small_jpeg/C5/0/points} more than plain TopK, and EF21 {cifar_small_jpeg/C5/2}.",
        overturn="a repetition on the original images, or for 100 epochs, with other verdicts.",
    ),
    Finding(
        "C1-C6",
        "What of arXiv 2401.07788 holds on small images?",
        tuple(
            ("digits_core", name)
            for name in ("C1, 2 bit", "C1, 4 bit", "C1-group, 2 bit", "C2", "C3", "C4", "C5", "C6")
        ),
        "commsweep sweep launch digits_core && commsweep report digits_core",
        "anything of networks that are not small: 8x8 digits near their ceiling bear more than "
        "the images above do. The verdicts of `make demo` alone, three to five seeds, are in "
        "results/demo.",
        "digits_core/on_off.png",
        "test accuracy with compression on and off at inference",
        answer="A small ResNet on digits: TopK 10 % loses {digits_core/C2/0/points} and needs"
        " compression at inference ({digits_core/C3/0/points}). In 2 bits gradients "
        "lose {digits_core/C1, 2 bit/0/points} more than activations, but with a scale"
        " for 128 entries no more. EF ends {digits_core/C5/0/points} below plain TopK "
        "under compressed inference, EF21 {digits_core/C5/2}.",
        overturn="a larger network or set on which the verdicts turn; the next scale up has "
        "done so for some.",
    ),
]
