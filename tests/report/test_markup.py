"""The glossary of the page is that of the README."""

from linearizer.report.markup import glossary_html


def test_the_page_explains_the_words_of_the_readme():
    shown = glossary_html()
    assert shown.count("<dt>") == shown.count("<dd>") == 10
    assert "<dt>teacher, student</dt><dd>the original model;" in shown
    assert "paper and features buy by them</dd>" in shown
