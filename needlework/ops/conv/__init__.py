"""Causal depthwise convolution of tokens, with a state or on a table of them; depthwise/ has it in one pass."""

from needlework.ops.conv.op import causal_conv as causal_conv
from needlework.ops.conv.op import causal_conv_slots as causal_conv_slots
from needlework.ops.conv.op import step_conv as step_conv
