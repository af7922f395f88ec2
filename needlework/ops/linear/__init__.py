"""Linear maps of few rows, as a decoding step has them."""

from needlework.ops.linear.arguments import Normed as Normed
from needlework.ops.linear.arguments import NormedHeads as NormedHeads
from needlework.ops.linear.op import glu as glu
from needlework.ops.linear.op import linear as linear
from needlework.ops.linear.op import normed_glu as normed_glu
from needlework.ops.linear.op import normed_heads_linear as normed_heads_linear
from needlework.ops.linear.op import normed_linear as normed_linear
