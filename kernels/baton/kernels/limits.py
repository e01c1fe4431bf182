"""The devices and shapes that kernels support. Data only, without PyTorch."""

MIN_CAPABILITY = (8, 0)  # of a CUDA device
FP8_CAPABILITY = (8, 9)  # of a device that converts to and from 8 bits
WIDTH_STEP = 16  # of the matrix unit: the features of a linear are multiples of it
_STEPS = range(16, 257, 8)
HEAD_DIMS = (*_STEPS, 512)
HEAD_DIMS_TEXT = f"multiples of {_STEPS.step} from {_STEPS[0]} to {_STEPS[-1]}, and {HEAD_DIMS[-1]}"
BLOCK_SIZES = (16, 32, 64, 128)
LATENT_DIMS = range(32, 577, 8)  # of a vector that a token of latent attention keeps
