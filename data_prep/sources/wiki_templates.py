"""What a reader sees of the templates and parser functions that stand inside the running text of an article.

A dump contains the calls of templates, but an article shows their output. The output of any template could only be had
by running MediaWiki. This table covers the templates that occur most often inside sentences. All other templates, such
as infoboxes, citations, navigation boxes and notes for editors, are not running text, or their output is unknown.
"""

import re
from collections.abc import Callable, Mapping

Arguments = Mapping[str, str]
"""The visible text of the arguments that have one, by name. An argument without a name has its number, from "1" on."""


def shown_text(name: str, arguments: Arguments) -> str | None:
    """Return the text that a template shows.

    Args:
        name: name of the template, without the colon and the first argument of a parser function.
        arguments: the arguments. Each one is looked up only if the template shows it.

    Returns:
        The text, or None if the table does not have the template.
    """
    show = _SHOWN.get(name) or next((show for start, show in _SHOWN_BY_START if name.startswith(start)), None)
    return show(arguments) if show else None


def _get(arguments: Arguments, *names: str) -> str:
    """Return the first of these arguments that is not empty; an empty text if there is none."""
    return next((arguments[name] for name in names if arguments.get(name)), "")


def _unnamed(arguments: Arguments, start: int = 1) -> list[str]:
    """Return the arguments without a name, from the number `start` on, without the empty ones."""
    numbers = sorted(int(name) for name in arguments if name.isascii() and name.isdigit() and len(name) < 5)
    return [arguments[str(number)] for number in numbers if number >= start and arguments[str(number)]]


def _argument(*names: str) -> Callable[[Arguments], str]:
    return lambda arguments: _get(arguments, *names)


def _last(arguments: Arguments) -> str:
    return next(reversed(_unnamed(arguments)), "")


def _joined(separator: str, start: int = 1) -> Callable[[Arguments], str]:
    return lambda arguments: separator.join(_unnamed(arguments, start))


def _around(before: str, after: str) -> Callable[[Arguments], str]:
    return lambda arguments: (text := _get(arguments, "1")) and f"{before}{text}{after}"


def _constant(text: str) -> Callable[[Arguments], str]:
    return lambda arguments: text


_NUMBER = re.compile(r"[-+−]?[\d.,]")
_RANGE = {"-": "–", "–": "–", "to(-)": "–", "and(-)": " and ", "+/-": "±", "±": "±", "x": " × ", "*": " × "}
"""Words between the numbers of {{convert}} that are shown in another way."""
_UNITS = {"C": "°C", "F": "°F", "sqmi": "sq mi", "sqft": "sq ft", "cuft": "cu ft", "cumi": "cu mi"}
_UNITS |= {f"{unit}{power}": f"{unit}{'²³'[power - 2]}" for unit in ("mm", "cm", "m", "km") for power in (2, 3)}

_POWERS = {"e3": "thousand", "e6": "million", "e9": "billion", "e12": "trillion"}
_MANY = re.compile(r"(e3|e6|e9|e12|)(.*)", re.DOTALL)


def _convert(arguments: Arguments) -> str:
    """Return the numbers and the unit as they were written, such as "40 to 50 cm", without the converted ones."""
    words = _unnamed(arguments)
    if not words:
        return ""
    text, words = words[0], words[1:]
    while len(words) > 1 and _NUMBER.match(words[1]) and not _NUMBER.match(words[0]) and _is_range(words):
        text += _RANGE.get(words[0], f" {words[0]} ") + words[1]
        words = words[2:]
    if words:
        many, unit = _MANY.match(words[0]).groups()  # type: ignore[union-attr]  # it matches every text
        text += f" {many and _POWERS[many] + ' '}{_UNITS.get(unit, unit)}"
    # {{convert|6|ft|2|in|m}} has a second, smaller unit. In {{convert|330|m|0|abbr=on}}, the number is a precision.
    if len(words) > 2 and _NUMBER.match(words[1]) and words[2] in ("in", "ft", "yd", "oz", "lb"):
        text += f" {words[1]} {words[2]}"
    return text


def _is_range(words: list[str]) -> bool:
    """Return True if the first word stands between two numbers: a sign, or a word that is no unit."""
    return words[0] in _RANGE or bool(re.match(r"(?:to|and|or|by|by about|to about|xx)\b", words[0]))


def _value(arguments: Arguments) -> str:
    """Return the number of {{val}}, with its uncertainty, power of ten and unit."""
    number, error, exponent, unit = (_get(arguments, *names) for names in ("1", "2", "e", ("u", "ul")))
    text = number + (error and f"±{error}")
    text += exponent and (f"×10{exponent}" if text else f"10{exponent}")
    return _get(arguments, "p") + text + (unit and f" {unit}") + _get(arguments, "s")


def _fraction(arguments: Arguments) -> str:
    parts = _unnamed(arguments)
    if len(parts) < 2:
        return f"1⁄{parts[0]}" if parts else ""
    return " ".join(parts[:-2] + ["⁄".join(parts[-2:])])


_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def _date(arguments: Arguments) -> str:
    """Return a date whose arguments are year, month and day, as {{start date|1999|12|31}}: December 31, 1999."""
    year, month, day = (_get(arguments, name) for name in "123")
    if not year.isdigit() or len(year) < 3 or not re.fullmatch(r"0?[1-9]|1[0-2]|", month):
        return " ".join(_unnamed(arguments)[:3])  # a date with its parts in another order, or written out
    month, day = month and _MONTHS[int(month) - 1], day.lstrip("0")
    if not month or not day:
        return f"{month} {year}".strip()
    return f"{day} {month} {year}" if _get(arguments, "df") else f"{month} {day}, {year}"


def _as_of(arguments: Arguments) -> str:
    word = "Since" if _get(arguments, "since") else "As of"
    date = _date({**{name: _get(arguments, name) for name in "123"}, "df": "y" if not _get(arguments, "df") else ""})
    return _get(arguments, "alt") or f"{word.lower() if _get(arguments, 'lc') else word} {date}"


def _quotation(arguments: Arguments) -> str:
    """Return a quotation on lines of its own, and below it who said it and where."""
    by = ", ".join(filter(None, (_get(arguments, "author", "by", "2"), _get(arguments, "source", "title", "3"))))
    return f"\n{_get(arguments, 'text', 'quote', '1')}\n" + (by and f"— {by}\n")


def _sic(arguments: Arguments) -> str:
    text = "".join(_unnamed(arguments)[:2])
    return text if _get(arguments, "hide") else f"{text} [sic]".strip()


def _pronunciation(arguments: Arguments) -> str:
    """Return the sounds of {{IPAc-en|ˈ|k|æ|t}} between slashes, without the labels and the sound file."""
    sounds = [one for one in _unnamed(arguments) if one.lower() not in _LABELS and not _SOUND_FILE.search(one)]
    return f"/{''.join(sounds).replace('_', ' ')}/" if sounds else ""


_SOUND_FILE = re.compile(r"\.\w{3,4}$")
_LABELS = frozenset(("us", "uk", "au", "nz", "ca", "ame", "bre", "lang", "pron", "ipa", "also", "local", "and", "or"))


def _ipa(arguments: Arguments) -> str:
    """Return a pronunciation: {{IPA|/kæt/}}, or in brackets if a language is named: {{IPA|de|kats}}."""
    first, second = _get(arguments, "1"), _get(arguments, "2")
    is_language = second and re.fullmatch(r"[a-z]{2,3}(?:-[A-Za-z]+)*", first)
    return f"[{second}]" if is_language else first


def _link_to_other_wiki(arguments: Arguments) -> str:
    """Return the text of {{ill|Title|de|Titel}}, also with the order of before 2018: {{ill|de|Titel|Text}}."""
    if re.fullmatch(r"[a-z]{2,3}", _get(arguments, "1")):
        return _get(arguments, "lt", "3", "2")
    return _get(arguments, "lt", "1")


def _japanese(arguments: Arguments) -> str:
    text, inside = _get(arguments, "1"), ", ".join(_unnamed(arguments, 2))
    return f"{text} ({inside})".strip() if inside else text


def _ship(prefix: str) -> Callable[[Arguments], str]:
    def show(arguments: Arguments) -> str:
        """Return {{USS|Hornet|CV-12}} as USS Hornet (CV-12). A third argument hides the number or the prefix."""
        name, number, form = (_get(arguments, one) for one in "123")
        shown = name if form == "2" else f"{prefix} {name}"
        return f"{shown} ({number})" if number and not form else shown

    return show


_SHIP_PREFIXES = ("USS", "HMS", "HMAS", "HMCS", "HMNZS", "SS", "MS", "MV", "RMS", "SMS", "INS", "USNS", "USCGC")


def _chinese(arguments: Arguments) -> str:
    return "; ".join(filter(None, (_get(arguments, name) for name in ("c", "s", "t", "p", "tp", "w", "j", "y", "l"))))


def _old_style_date(arguments: Arguments) -> str:
    day, year, old = (_get(arguments, name) for name in "123")
    return f"{day} [O.S. {old}] {year}"


_SHOWN: dict[str, Callable[[Arguments], str]] = {}
_SHOWN_BY_START = (
    ("lang-", _joined(", ")), ("ipac-", _pronunciation), ("ipa-", _around("[", "]")), ("script/", _argument("1")),
)  # fmt: skip
"""How templates are shown whose names begin like this, such as {{lang-de|Zeitgeist}}."""
for _names, _show in (
    ("nowrap, nobr, nobold, noitalic, normal, small, smaller, midsize, big, bigger, large, larger, em, strong, sc,"
     "smallcaps, sc2, caps, allcaps, sub, sup, overline, underline, u, strike, mono, monospace, code, var, kbd, samp,"
     "math, mvar, bigmath, abbr, abbrlink, tooltip, hover title, define, vanchor, visible anchor, not a typo, typo,"
     "as written, proper name, proper noun, nq, rtl, ltr, bdo, iast, unicode, polytonic, hebrew, arabic, ipalink,"
     "ipablink, ipa link, flag, flagcountry, flagu, flagg, railgauge, track gauge, plainlist, plain list, flatlist,"
     "nihongo foot, block indent, gloss, ws, tq, crossreference, glossary link, nts, formatnum, lcfirst, ucfirst,"
     "nombre, zitat, center, centre, chem2, definition, defn, term", _argument("1", "text", "content")),
    ("lang, langue, color, colour, rtl-lang, script, wikt-lang, wt, langx, lang-rtl, dfn-lang", _argument("2", "text")),
    ("transl, transliteration, resize, font color, fontcolor, columns-list, column list, columnslist", _last),
    ("convert, cvt, unité, unité/2, unidad", _convert),
    ("val", _value),
    ("frac, fraction", _fraction),
    ("sfrac", lambda arguments: _fraction(arguments).replace("⁄", "/")),
    ("e", _around("×10", "")),
    ("chem, gaps, linktext", _joined("")),
    ("lc", lambda arguments: _get(arguments, "1").lower()), ("uc", lambda arguments: _get(arguments, "1").upper()),
    ("circa, c., ca.", lambda arguments: "c. " + " – c. ".join(_unnamed(arguments))),
    ("fl., floruit, fl", lambda arguments: "fl. " + " – ".join(_unnamed(arguments))),
    ("reign, r.", lambda arguments: "r. " + "–".join(_unnamed(arguments))),
    ("start date, end date, start date and age, end date and age, birth date, death date, birth date and age,"
     "film date, date, dts, bda", _date),
    ("oldstyledate", _old_style_date),
    ("as of", _as_of),
    ("quote, blockquote, quotation, bquote, cquote, block quote, poem quote, poemquote, centered pull quote",
     _quotation),
    ("sic", _sic),
    ("ipa, ipa-all", _ipa),
    ("ipaslink, ipa slink", _around("/", "/")),
    ("respell, pronunciation respelling", lambda arguments: "-".join(_unnamed(arguments)).replace("-_-", " ")),
    ("angbr, angle bracket, grapheme", _around("⟨", "⟩")),
    ("ill, interlanguage link, illm, ill2, link-interwiki, interlanguage link multi", _link_to_other_wiki),
    ("nihongo, nihongo2, korean", _japanese),
    ("zh, zh-tsp, zh-cp", _chinese),
    ("bibleverse, bibleref, bibleref2", lambda arguments: " ".join(_unnamed(arguments)[:2])),
    ("hlist, flat list", _joined(" · ")),
    ("ubl, unbulleted list, bulleted list, ordered list, blist, olist", _joined("\n")),
    ("us$, usd", _around("US$", "")), ("a$, aud", _around("A$", "")), ("c$, cad", _around("C$", "")),
    ("€, euro, eur", _around("€", "")), ("£, gbp, pound sterling", _around("£", "")), ("¥, jpy, yen", _around("¥", "")),
    ("₹, inr, indian rupee", _around("₹", "")),
    ("ship", lambda arguments: _ship(_get(arguments, "1"))(
        {str(number): _get(arguments, str(number + 1)) for number in (1, 2, 3)})),
    *((prefix.lower(), _ship(prefix)) for prefix in _SHIP_PREFIXES),
    ("music", lambda arguments: {"flat": "♭", "sharp": "♯", "natural": "♮"}.get(_get(arguments, "1"), "")),
    ("snd, spaced ndash, spnd, spndash, snds", _constant(" – ")),
    ("ndash, en dash", _constant("–")), ("mdash, em dash, mdashb", _constant("—")),
    ("spaced mdash", _constant(" — ")),
    ("nbsp, thinsp, spaces, space, nnbsp, hair space, sp, px2, 0ws", _constant(" ")),
    ("dot, ·, •, middot, bullet, bull", _constant(" · ")),
    ("'", _constant("'")), ("'s", _constant("'s")), ("' \"", _constant("' \"")), ("\" '", _constant("\" '")),
    ("-\"", _constant("\"")), ("pi", _constant("π")), ("!", _constant("|")), ("=", _constant("=")),
    ("minus", _constant("−")), ("times", _constant("×")), ("(", _constant("{")), (")", _constant("}")),
    ("pm", _constant("±")), ("degree", _constant("°")), ("break, br", _constant("\n")),
):  # fmt: skip
    _SHOWN |= dict.fromkeys(map(str.strip, _names.split(",")), _show)
