"""Attention over pages: keys and values behind block tables, read by one query a sequence or by packed new tokens."""

from needlework.ops.paged.op import paged_attention as paged_attention
from needlework.ops.paged.op import paged_differential as paged_differential
from needlework.ops.paged.op import paged_polar as paged_polar
from needlework.ops.paged.op import write_pages as write_pages
