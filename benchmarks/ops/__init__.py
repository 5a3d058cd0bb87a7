"""What is timed: a file an op family, named like the op's file in ``ligerformer/kernels``; a row is one op at one shape."""

from . import attention, cross_entropy, divergences, glu, linear_cross_entropy, mhc, norms, rope, softmax

ROWS = [
    *norms.ROWS,
    *glu.ROWS,
    *rope.ROWS,
    *softmax.ROWS,
    *cross_entropy.ROWS,
    *linear_cross_entropy.ROWS,
    *divergences.ROWS,
    *mhc.ROWS,
    *attention.ROWS,
]
