"""Pieces of a page that needs nothing but itself: text, tables, figures in base64, Markdown of our own tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .3rem 0; }
th, td { border: 1px solid #8886; padding: .2rem .6rem; text-align: left; vertical-align: top; }
th { background: #8882; }
figure { margin: 1.2rem 0; }
img { max-width: 100%; background: #fff; }
.from, figcaption { font-size: .85em; opacity: .75; }
.bad { color: #c22; }
code { font-size: .9em; overflow-wrap: anywhere; }
details { margin: .4rem 0; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """The whole document."""
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return f"{head}{view}<style>{STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"


def heading(level: int, text: str) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph, with a class of the style sheet."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def table(header: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of plain text; a line break in a cell is kept."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def figure(path: Path, caption: str) -> str:
    """A picture within the page."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    image = f'<img alt="{escape(path.name)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(path.name)}: {escape(caption)}</figcaption></figure>"


def folded(summary: str, content: str) -> str:
    """Something that opens when it is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def markdown(text: str) -> str:
    """Headings, paragraphs, lists and tables: what our tables consist of."""
    out: list[str] = []
    rows: list[list[str]] = []

    def flush() -> None:
        if rows:
            out.append(table(rows[0], rows[1:]))
            rows.clear()

    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                rows.append(cells)
            continue
        flush()
        if match := re.match(r"(#+) (.*)", line):
            out.append(heading(min(len(match[1]) + 2, 6), match[2]))
        elif line.startswith("- "):
            out.append(f"<ul><li>{escape(line[2:])}</li></ul>")
        elif line.strip():
            out.append(paragraph(line))
    flush()
    return "\n".join(out)
