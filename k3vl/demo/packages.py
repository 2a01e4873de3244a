"""The packages that the demo model is made from, with their versions."""

from __future__ import annotations

EMOJI = {
    "emojibase-data": "17.0.0",
    "@iconify-json/noto": "1.2.9",
    "@iconify-json/noto-v1": "1.2.5",
    "@iconify-json/twemoji": "1.2.5",
    "@iconify-json/fluent-emoji-flat": "1.2.6",
    "@iconify-json/fluent-emoji-high-contrast": "1.2.6",
    "@iconify-json/fxemoji": "1.2.2",
    "@iconify-json/streamline-emojis": "1.2.4",
    "@iconify-json/flat-color-icons": "1.2.3",
    "@iconify-json/openmoji": "1.2.29",
    "@iconify-json/emojione-v1": "1.2.3",
    "@lobehub/fluent-emoji-3d": "1.1.0",
}
"""Names and drawings, from npm."""

ICONS = {
    "@fontsource/noto-emoji": "5.3.2",
    "@iconify-json/game-icons": "1.2.4",
    "@iconify-json/healthicons": "1.2.13",
    "@iconify-json/hugeicons": "1.2.35",
    "@iconify-json/icon-park": "1.2.4",
    "@iconify-json/icon-park-outline": "1.2.4",
    "@iconify-json/iconoir": "1.2.11",
    "@iconify-json/lucide": "1.2.137",
    "@iconify-json/material-symbols": "1.2.98",
    "@iconify-json/mdi": "1.2.3",
    "@iconify-json/mingcute": "1.2.8",
    "@iconify-json/ph": "1.2.2",
    "@iconify-json/tabler": "1.2.41",
    "@iconify-json/temaki": "1.2.6",
}
"""Line icons and a font of one colour, from npm."""

CLIP_ART = "openclipart-svg"
SYMBOLA = "fonts-symbola"
STAMPS = "tuxpaint-stamps-default"
FONTS: dict[str, tuple[str, ...]] = {
    "fonts-cabin": (
        "Cabin-Bold.otf",
        "Cabin-Regular.otf",
    ),
    "fonts-comic-neue": ("ComicNeue-Regular.otf",),
    "fonts-crosextra-carlito": ("Carlito-Regular.ttf",),
    "fonts-dancingscript": ("DancingScript-Bold.otf",),
    "fonts-dejavu-core": (
        "DejaVuSans-Bold.ttf",
        "DejaVuSans.ttf",
        "DejaVuSansMono.ttf",
        "DejaVuSerif-Bold.ttf",
        "DejaVuSerif.ttf",
    ),
    "fonts-dejavu-extra": ("DejaVuSerifCondensed-Italic.ttf",),
    "fonts-ebgaramond": ("EBGaramond12-Regular.otf",),
    "fonts-firacode": ("FiraCode-Regular.ttf",),
    "fonts-freefont-ttf": (
        "FreeMonoBold.ttf",
        "FreeSansOblique.ttf",
        "FreeSerifBoldItalic.ttf",
    ),
    "fonts-hack": (
        "Hack-Bold.ttf",
        "Hack-Regular.ttf",
    ),
    "fonts-humor-sans": ("Humor-Sans.ttf",),
    "fonts-inconsolata": ("Inconsolata.otf",),
    "fonts-jura": (
        "Jura-Bold.otf",
        "Jura-Regular.otf",
    ),
    "fonts-lato": (
        "Lato-Black.ttf",
        "Lato-Italic.ttf",
        "Lato-Regular.ttf",
    ),
    "fonts-liberation": (
        "LiberationMono-Regular.ttf",
        "LiberationSans-BoldItalic.ttf",
        "LiberationSans-Regular.ttf",
        "LiberationSansNarrow-Bold.ttf",
        "LiberationSerif-Bold.ttf",
        "LiberationSerif-Italic.ttf",
        "LiberationSerif-Regular.ttf",
    ),
    "fonts-linuxlibertine": (
        "LinBiolinum_R.otf",
        "LinLibertine_R.otf",
    ),
    "fonts-lobster": ("lobster.otf",),
    "fonts-noto-core": (
        "NotoSansDisplay-Regular.ttf",
        "NotoSerifDisplay-Italic.ttf",
    ),
    "fonts-open-sans": (
        "OpenSans-CondLight.ttf",
        "OpenSans-ExtraBold.ttf",
        "OpenSans-Regular.ttf",
    ),
    "fonts-quicksand": (
        "Quicksand-Bold.ttf",
        "Quicksand-Regular.ttf",
    ),
    "fonts-roboto-unhinted": (
        "Roboto-Black.ttf",
        "Roboto-Regular.ttf",
        "RobotoCondensed-Regular.ttf",
    ),
    "fonts-urw-base35": (
        "C059-BdIta.otf",
        "C059-Roman.otf",
        "NimbusRoman-Italic.otf",
        "NimbusSansNarrow-Regular.otf",
        "P052-Italic.otf",
        "P052-Roman.otf",
        "URWBookman-Light.otf",
        "URWGothic-Book.otf",
        "URWGothic-Demi.otf",
        "Z003-MediumItalic.otf",
    ),
    "fonts-vollkorn": (
        "Vollkorn-BlackItalic.ttf",
        "Vollkorn-Italic.ttf",
        "Vollkorn-Regular.ttf",
    ),
}
"""Files that are printed with, by Debian package. Of Debian's packages the release decides the
version."""
