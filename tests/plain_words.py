"""Words that the glossary replaces, where they can mean nothing else; for tests of help and messages."""

from __future__ import annotations

import re

DO_NOT_SAY = re.compile(
    r"\b(nobody|somebody|anybody|whoever|(one|those) who|who (has|have|wants)|besides?|anew|told of|is to be|"
    r"are to be|cut off|broken off|breaks? off|(that|what|all|which) (is|are) there|is not there|are there|"
    r"believe[sd]?|so many|so much|"
    r"errand|under way|on its way|elsewhere|lets? go|what (becomes|comes) of|what becomes|"
    r"ow(e|es|ed|ing)|patience|patient|make room|(no|has|more|less) room|room for|sprint|"
    r"strangers?|doubt(ful)?|looks? after|looked after|second (try|tries)|earlier try|tried once more|"
    r"h[eo]ld up|goodbye|last words|sign of life|"
    r"mend|in vain|in one (go|breath)|head start|pass(es|ed)? over|"
    r"stands? (in|before|after|behind|neither|for something)|behind (it|its|the other|the whole)|"
    r"of the way|is said|come to rest|be rid of|goes on|go on|in reach|out of reach|"
    r"take[sn]? (it|them|all|another|a) (out|name)|of its own accord|an? blank|blanks)\b"
)
"""See the glossary: say "link", "report", "no client", "exists", "next to", "again", "must be"..."""

NOT_A = re.compile(r"(?<!there )\b(is|are) no (?!longer\b|more\b|less\b|space\b|such\b|action\b|{)")
"""``X is no file``: say "is not a file"."""
