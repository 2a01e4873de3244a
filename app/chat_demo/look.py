"""How the demo looks: theme, style sheet and fixed texts. System fonts; nothing is fetched."""

from __future__ import annotations

import html

import gradio as gr

_SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

TOGGLE_THEME = "() => { document.body.classList.toggle('dark'); }"

HEAD = '<meta name="color-scheme" content="light dark">'

CSS = """
.gradio-container { max-width: 1440px !important; margin: 0 auto; padding: 0 !important; }
footer { display: none !important; }
#k3-head { align-items: center; flex-wrap: nowrap; gap: 12px; padding: 2px 2px 0; }
#k3-head .k3-title { display: flex; align-items: baseline; gap: 12px; min-width: 0; }
#k3-head h1 { font-size: 20px; font-weight: 650; letter-spacing: -0.02em; margin: 0; }
#k3-head p { margin: 0; color: var(--body-text-color-subdued); white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }
#k3-head code { font-size: 12px; padding: 2px 8px; border-radius: 999px;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
#k3-head button { flex: 0 0 auto; min-width: 0; width: auto; }
#k3-chat { border-radius: 14px; }
#k3-chat .placeholder-content { padding: 12px; }
#k3-box { border-radius: 14px; }
.k3-intro { max-width: 560px; margin: 0 auto; text-align: center; }
.k3-intro h2 { font-size: 22px; font-weight: 650; letter-spacing: -0.02em; margin: 0 0 8px; }
.k3-intro p { color: var(--body-text-color-subdued); line-height: 1.55; margin: 0 0 6px; }
.k3-note { font-size: 13.5px; line-height: 1.5; padding: 8px 12px; border-radius: 8px; }
.k3-problem { background: rgba(217, 119, 6, .10); border-left: 3px solid #d97706; }
.k3-quiet { color: var(--body-text-color-subdued); padding: 2px 0; }
.k3-section { font-size: 12px; font-weight: 600; letter-spacing: .04em; margin: 2px 0 0;
  text-transform: uppercase; color: var(--body-text-color-subdued); }
.k3-figures { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 8px; }
.k3-tile { display: flex; flex-direction: column; padding: 8px 10px; border-radius: 10px;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.k3-value { font-size: 16px; font-weight: 600; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.k3-label { font-size: 11.5px; color: var(--body-text-color-subdued); white-space: nowrap; }
.k3-line { font-size: 12.5px; color: var(--body-text-color-subdued); margin-top: 8px; }
.k3-facts h4 { font-size: 13.5px; font-weight: 600; margin: 8px 0 4px; overflow-wrap: anywhere; }
.k3-facts dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0;
  font-size: 13px; }
.k3-facts dt { color: var(--body-text-color-subdued); }
.k3-facts dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.k3-facts .k3-warn { font-size: 12.5px; margin: 6px 0 0; color: #b45309; }
.dark .k3-facts .k3-warn { color: #fbbf24; }
.k3-empty { font-size: 13px; line-height: 1.5; color: var(--body-text-color-subdued); }
#k3-seen { border-radius: 10px; }
@media (max-width: 768px) {
  #k3-head p { display: none; }
  .k3-figures { grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 6px; }
  .k3-tile { padding: 6px 8px; }
  .k3-value { font-size: 14px; }
  #k3-chat { height: 64dvh !important; }
}
"""

SEEN_EMPTY = (
    '<div class="k3-empty">Attach a picture or a clip: here you will see the very pixels that go '
    "into the vision tower, with its patches, and what they cost in tokens.</div>"
)

DEMO_INTRO = (
    "<p>This is the small demo checkpoint. It knows drawn objects, their names, colours, counts "
    "and places, printed words, and short clips of things that move.</p>"
    "<p>It has never seen photographs, and needs a picture to talk about.</p>"
)
MODEL_INTRO = "<p>Attach pictures or video clips and ask about them.</p>"


def theme() -> gr.themes.Base:
    """Neutral surfaces, one teal accent."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="zinc",
        radius_size="md",
        font=_SANS,
        font_mono=_MONO,
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_border_width="1px",
        block_shadow="none",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
    )


def header(model: str) -> str:
    """The title line; ``model`` is a name or a directory's last part."""
    return (
        f'<div class="k3-title"><h1>k3vl</h1><code>{html.escape(model)}</code>'
        "<p>Kimi K3 looks at pictures and video</p></div>"
    )


def intro(*, demo_model: bool) -> str:
    """What stands in an empty chat."""
    about = DEMO_INTRO if demo_model else MODEL_INTRO
    return f'<div class="k3-intro"><h2>Show it something</h2>{about}</div>'


def section(title: str) -> str:
    """A small heading."""
    return f'<div class="k3-section">{title}</div>'
