"""Gives a package index the README without what works only beside the code.

Pictures and links that name files of the repository are left out.
"""

import pathlib
import re

import setuptools

text = pathlib.Path(__file__).with_name("README.md").read_text()
text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
setuptools.setup(
  long_description=text, long_description_content_type="text/markdown"
)
