"""The devices and shapes that kernels support. Data only, without PyTorch."""

MIN_CAPABILITY = (8, 0)  # of a CUDA device
FP8_CAPABILITY = (8, 9)  # of a device that converts to and from 8 bits
WIDTH_STEP = 16  # of the matrix unit: the features of a linear are multiples of it
HEAD_DIMS = range(16, 257, 8)
BLOCK_SIZES = (16, 32, 64, 128)
