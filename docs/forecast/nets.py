"""Networks that the forecast never saw: an MLP-Mixer, a vision transformer, a ResNet with
GroupNorm, and LSTM layers.
"""

from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

WIDTH, PATCHES = 32, 16


class Mixing(nn.Module):
    """A block of MLP-Mixer: tokens are mixed, then channels."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.tokens = nn.Sequential(nn.Linear(PATCHES, 32), nn.GELU(), nn.Linear(32, PATCHES))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    """Patches of 2 x 2 pixels, four blocks, and the mean over patches."""

    def __init__(self, channels, classes):
        super().__init__()
        self.patches = nn.Conv2d(channels, WIDTH, 2, 2)
        self.blocks = nn.ModuleList([Mixing() for _ in range(4)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes))

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Gray(nn.Module):
    """Repeats a gray image in the three channels of a network."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.expand(-1, 3, -1, -1))


class Layer(nn.Module):
    """An LSTM layer, without its last state."""

    def __init__(self, inputs):
        super().__init__()
        self.lstm = nn.LSTM(inputs, 64, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Recurrent(nn.Module):
    """Three LSTM layers that read an image row by row."""

    def __init__(self, width, classes):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width), Layer(64), Layer(64)])
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        x = x[:, 0]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


class Normed(nn.Module):
    """A residual block with GroupNorm; a stride of 2 halves the image."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.GroupNorm(4, width),
        )
        self.way = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x):
        return (self.body(x) + self.way(x)).relu()


class NormedNet(nn.Module):
    """Four residual blocks with GroupNorm, and the mean over the image."""

    def __init__(self, channels, classes):
        super().__init__()
        sizes = [(channels, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.blocks = nn.ModuleList([Normed(*size) for size in sizes])
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def mixer(sample, classes):
    return Mixer(sample.shape[1], classes)


def vit(sample, classes):
    return Gray(VisionTransformer(8, 2, 4, 2, 32, 64, num_classes=classes))


def group_norm(sample, classes):
    return NormedNet(sample.shape[1], classes)


def recurrent(sample, classes):
    return Recurrent(sample.shape[-1], classes)
