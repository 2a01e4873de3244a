"""How the demo looks: theme, style sheet and fixed texts. System fonts; nothing is fetched."""

from __future__ import annotations

import html

import gradio as gr

_SANS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

TOGGLE_THEME = "() => { document.body.classList.toggle('dark'); }"
TOGGLE_DRAWER = "() => { document.querySelector('.sidebar .toggle-button').click(); }"

HEAD = '<meta name="color-scheme" content="light dark">'

CSS = """
.gradio-container { max-width: 1480px !important; margin: 0 auto !important;
  padding: 0 !important; width: 100%; }
.gradio-container > .main { padding: 14px 24px 18px !important; }
.gradio-container footer { display: none !important; }
.gradio-container .html-container { padding: 0 !important; }
#k3-head { align-items: center; flex-wrap: nowrap; gap: 8px; }
#k3-head .k3-title { display: flex; align-items: center; gap: 10px; min-width: 0; }
#k3-head h1 { font-size: 19px; font-weight: 650; letter-spacing: -0.02em; margin: 0; }
#k3-head p { margin: 0; color: var(--body-text-color-subdued); white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }
#k3-head code { font-size: 12px; padding: 1px 9px; border-radius: 999px; color: var(--k3-accent);
  background: transparent; border: 1px solid var(--k3-accent); }
#k3-head button { flex: 0 0 auto; min-width: 0; width: auto; padding: 6px 12px; font-weight: 500;
  background: transparent; border: 1px solid var(--border-color-primary); }
#k3-head button:hover { background: var(--background-fill-primary); }
.gradio-container { --k3-accent: #0f766e; }
.dark .gradio-container, .gradio-container.dark { --k3-accent: #2dd4bf; }

.k3-main { height: calc(100dvh - 80px); min-height: 440px; flex-wrap: nowrap !important; }
.k3-main .form { flex: 0 0 auto !important; }
#k3-chat { border-radius: 14px; flex: 1 1 0; height: auto !important; min-height: 0; }
#k3-chat .examples { grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 10px;
  width: 100%; max-width: 800px; padding: 0 16px 20px; margin: 0 auto; }
#k3-chat .example { padding: 10px; border-radius: 12px; min-height: 0; }
#k3-chat .example:hover { border-color: var(--k3-accent); }
#k3-chat .example-content { flex-direction: row; align-items: center; gap: 12px; text-align: left; }
#k3-chat .example-image-container, #k3-chat .example-image { width: 56px; height: 56px; margin: 0;
  flex: 0 0 56px; border-radius: 8px; object-fit: cover; }
#k3-chat .example-content video { width: 56px; height: 56px; border-radius: 8px; }
#k3-chat .example-text { font-size: 13.5px; line-height: 1.4; }
#k3-chat .image-frame img { max-height: 260px; width: auto; max-width: 100%; border-radius: 8px; }
#k3-chat .message video { max-height: 260px; border-radius: 8px; }
#k3-chat .image-container { height: auto; }
#k3-chat .user.message { border-radius: 14px; }
#k3-chat .bot.message { border-color: transparent; background: transparent; padding-left: 2px;
  box-shadow: none; }
#k3-chat button[title="Share"] { display: none; }
#k3-chat .message-wrap { gap: 8px; }
#k3-chat .message-row { margin-top: 8px; margin-bottom: 0; }
#k3-chat .message-buttons { margin: -2px 0 8px; }
#k3-chat .message-buttons .icon-button-wrapper { border: 0; background: transparent;
  box-shadow: none; opacity: .75; }
#k3-chat .message-row:has(.thought-group) + .message-buttons,
#k3-chat .user-row:has(.component) + .message-buttons { display: none; }
#k3-chat .user-row:has(.component) .user.message { padding: 4px; }
#k3-chat .thought-group { border-radius: 10px; border-left: 2px solid var(--k3-accent); }

#k3-box { border-radius: 14px; }
#k3-box .submit-button, #k3-box .stop-button { border-radius: 10px; color: white;
  background: #0f766e; }
#k3-box .submit-button:hover, #k3-box .stop-button:hover { background: #115e59; }
#k3-result { padding: 12px 12px 4px; }
#k3-result textarea { border-radius: 10px; border: 1px solid var(--k3-accent); }
#k3-result .submit-button { border-radius: 10px; color: white; background: #0f766e;
  margin-left: 10px; }
#k3-result .submit-button:hover { background: #115e59; }
.form:has(#k3-box) { border-radius: 14px; }

.k3-intro { max-width: 600px; margin: 0 auto; text-align: center; }
.k3-intro h2 { font-size: 24px; font-weight: 650; letter-spacing: -0.02em; margin: 0 0 10px; }
.k3-intro p { color: var(--body-text-color-subdued); line-height: 1.6; margin: 0 0 6px; }
.k3-note { font-size: 13.5px; line-height: 1.5; padding: 9px 13px; border-radius: 8px; }
.k3-problem { background: rgba(217, 119, 6, .10); border-left: 2px solid #d97706; }
.k3-quiet { color: var(--body-text-color-subdued); padding: 2px 0; }

.k3-side { gap: 10px !important; }
.k3-side .k3-section:not(:first-child) { margin-top: 8px; }
.k3-section { font-size: 13px; font-weight: 600; color: var(--body-text-color); margin: 6px 0 0; }
.k3-hint { font-weight: 400; font-size: 12px; margin-left: 8px;
  color: var(--body-text-color-subdued); }
.k3-figures { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 8px; }
.k3-tile { display: flex; flex-direction: column; padding: 8px 4px 8px 10px; border-radius: 10px;
  background: var(--background-fill-primary); border: 1px solid var(--border-color-primary); }
.k3-value { font-size: 15px; font-weight: 600; font-variant-numeric: tabular-nums;
  line-height: 1.35; white-space: nowrap; }
.k3-label { font-size: 11.5px; line-height: 1.35; color: var(--body-text-color-subdued);
  white-space: nowrap; }
.k3-line { font-size: 12.5px; color: var(--body-text-color-subdued); margin-top: 8px; }
.k3-facts h4 { font-size: 13px; font-weight: 600; margin: 4px 0 4px; overflow-wrap: anywhere; }
.k3-facts dl { display: grid; grid-template-columns: max-content 1fr; gap: 1px 14px;
  margin: 0 0 8px; font-size: 13px; line-height: 1.6; }
.k3-facts dt { color: var(--body-text-color-subdued); }
.k3-facts dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.k3-facts .k3-warn { font-size: 12.5px; margin: 0 0 8px; color: #b45309; }
.dark .k3-facts .k3-warn { color: #fbbf24; }
.k3-empty { font-size: 13px; line-height: 1.55; color: var(--body-text-color-subdued); }
#k3-seen { border: 0; background: transparent; padding: 0; }
#k3-seen .grid-wrap { height: auto !important; max-height: 52dvh; min-height: 0; padding: 0; }
#k3-seen .grid-container { grid-template-rows: none; gap: 8px; }
#k3-seen .thumbnail-item { aspect-ratio: auto; border-radius: 8px; height: auto; }
#k3-seen .thumbnail-item img { height: auto; width: 100%; }
#k3-seen .gallery-item { position: relative; }
#k3-seen .caption-label { font-size: 11.5px; padding: 1px 7px; opacity: .92; }

.sidebar { background: var(--background-fill-primary); }
.sidebar:not(.open) .toggle-button { visibility: hidden; }

@media (max-width: 768px) {
  .gradio-container > .main { padding: 8px 10px 14px !important; }
  #k3-head p { display: none; }
  #k3-head button { padding: 5px 9px; font-size: 12.5px; }
  #k3-head code { display: none; }
  .k3-main { height: calc(100dvh - 64px); }
  #k3-chat .examples { grid-template-columns: repeat(2, minmax(0, 1fr)); padding: 0 8px 10px; }
  #k3-chat .example-content { gap: 8px; }
  #k3-chat .example-image-container, #k3-chat .example-image { width: 40px; height: 40px;
    flex-basis: 40px; }
  #k3-chat .example-text { font-size: 12.5px; }
  .k3-intro h2 { font-size: 20px; }
  .k3-intro p { font-size: 13.5px; line-height: 1.5; }
}
"""

SEEN_HINT = "click any message for its files"
SEEN_EMPTY = (
    '<div class="k3-empty">Attach a picture or a clip: here you will see the very pixels that go '
    "into the vision tower, with its patches, and what they cost in tokens.</div>"
)

DEMO_INTRO = (
    "<p>This is the small demo checkpoint. It knows drawn objects, their names, colours, counts "
    "and places, printed words, and short clips of things that move.</p>"
    "<p>It has never seen a photograph. Paste, drop or attach a drawing, or try one of these.</p>"
)
MODEL_INTRO = "<p>Paste, drop or attach pictures or video clips, and ask about them.</p>"


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
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        color_accent_soft="*neutral_100",
        color_accent_soft_dark="*neutral_800",
        border_color_accent_subdued="*neutral_200",
        border_color_accent_subdued_dark="*neutral_700",
        background_fill_primary_dark="*neutral_900",
        block_background_fill_dark="*neutral_900",
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


def section(title: str, hint: str = "") -> str:
    """A small heading, with a quiet word beside it."""
    return f'<div class="k3-section">{title}<span class="k3-hint">{hint}</span></div>'
