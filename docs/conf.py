"""Sphinx settings: MyST pages, furo, API reference from docstrings, and parts generated while building (_ext/)."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "flexbwd"
copyright = "flexbwd authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "flexdocs"]
exclude_patterns = ["_build", "benchmarks", "demo", "_ext"]

html_theme = "furo"
html_title = "flexbwd"
html_show_copyright = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
