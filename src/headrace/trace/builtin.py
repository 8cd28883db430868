"""Length distributions that need no data files: what demos and tests draw from.

Tables of quantiles computed from public data, sides independent of each other. Means of a table lie
within 3 % of its source's; how long inputs and outputs belong together is lost, so a published
figure is repeated from the data itself (`mix.Empirical`).
"""

from headrace.trace.mix import Blend, Fixed, Lengths, Part, Quantiles, Table

PERCENTS = (
    0, 0.5, 1, 2.5, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 92.5,
    95, 97.5, 99, 99.5, 99.9, 100,
)  # fmt: skip
"""The 29 points of ServeGen's tables."""


def _table(*values: int) -> Table:
    return tuple(zip(PERCENTS, values, strict=True))


AZURE_CONV = Quantiles(
    input=_table(
        2, 17, 29, 120, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130,
        1189, 1315, 1875, 2733, 4075, 4083, 4092, 4142, 4830, 6102, 7930,
    ),
    output=_table(
        7, 14, 16, 28, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411,
        424, 430, 451, 522, 601, 643, 954, 1000,
    ),
)  # fmt: skip
"""Conversation, mean 1161 in and 210 out.

Source: the 19,365 rows with input + output < 8,000 of AzureLLMInferenceTrace_conv.csv (Azure Public
Dataset, CC-BY-4.0, Patel et al., Splitwise, ISCA 2024), whose means are 1154 and 211.
"""

CHAT = Quantiles(
    input=_table(
        2, 10, 17, 42, 121, 181, 200, 209, 237, 372, 380, 387, 393, 397, 400, 404, 408, 416, 432,
        788, 946, 989, 1000, 1009, 1016, 1020, 1022, 1023, 1023,
    ),
    output=_table(
        7, 12, 14, 18, 45, 62, 73, 81, 86, 89, 92, 96, 100, 105, 111, 122, 135, 155, 172, 205, 373,
        396, 407, 418, 443, 524, 575, 675, 1000,
    ),
)  # fmt: skip
"""Short conversation, mean 459 in and 159 out: the 9,795 rows above with input < 1,024.

Their means are 458 and 156; there the sides rise together (correlation .65), here they do not.
"""

REASONING = Quantiles(
    input=_table(
        4, 7, 9, 10, 13, 18, 26, 29, 43, 59, 78, 115, 171, 208, 225, 267, 350, 407, 488, 753, 1180,
        2096, 3860, 6743, 14213, 23427, 28268, 33849, 55949,
    ),
    output=_table(
        39, 113, 136, 179, 221, 284, 336, 382, 422, 463, 509, 569, 649, 761, 898, 1053, 1199, 1324,
        1445, 1589, 1886, 2801, 3473, 4349, 5701, 6961, 7501, 8066, 8172,
    ),
)  # fmt: skip
"""Long reasoning, mean 1324 in and 1245 out, outputs above 8,192 (2.6 %) left out.

Source: ServeGen deepseek-r1 (Apache-2.0), the tables of its 73 clients pooled by their requests.
"""

ARXIV = Quantiles(
    input=_table(
        1, 31, 73, 331, 749, 1242, 1564, 1802, 1986, 2150, 2308, 2453, 2596, 2730, 2861, 2996, 3127,
        3249, 3370, 3490, 3597, 3702, 3759, 3813, 3876, 3933, 3963, 4012, 4054,
    ),
    output=_table(
        5, 29, 36, 48, 60, 78, 92, 104, 115, 125, 135, 145, 156, 167, 179, 192, 206, 222, 242, 268,
        304, 372, 438, 736, 2508, 3270, 3583, 3845, 4056,
    ),
)  # fmt: skip
"""Summaries of papers, mean 2587 in and 294 out.

Source: the 28,257 lengths of arXiv summarization in Vidur (MIT, Microsoft), means 2588 and 291. There
both sides together stay below 4,096.
"""

BIMODAL = Blend(
    parts=(
        Part(weight=4, lengths=AZURE_CONV),
        Part(weight=1, lengths=Fixed(input=16_384, output=512)),
    )
)
"""Four conversations to one document of 16,384 tokens in and 512 out."""

MIXES: dict[str, Lengths] = {
    "arxiv": ARXIV,
    "bimodal": BIMODAL,
    "chat": CHAT,
    "conv": AZURE_CONV,
    "reasoning": REASONING,
}
"""Those above by the names that commands know them under."""
