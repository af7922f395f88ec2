"""Linear maps of few rows, as a decoding step has them."""

from needlework.ops.linear.op import glu as glu
from needlework.ops.linear.op import linear as linear
