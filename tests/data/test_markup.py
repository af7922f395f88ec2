"""Markup is left out, and nothing that a reader sees."""

from needlework.data.markup import gcide_entries, html_text, pod_text, verses, wordnet_lines

PAGE = """<!DOCTYPE html><html><head><title>Not shown</title><style>p { x }</style></head><body>
<div class="navheader x"><div>Prev</div><br><table><tr><td>Up</td></tr></table></div>
<h1>Join<a class="headerlink" href="#">¶</a></h1><p>A <em>join</em>
 of   two&nbsp;tables &lt;a&gt;<br/>and more.</p>
<pre>SELECT *
  FROM a;</pre><ul><li>one<li>two</ul><table><tr><td>x</td><td>y</td></tr></table>
<script>if (a < b) {}</script><div class="footer">© <p>left open</div></body></html>"""


def test_a_page_is_its_text_and_its_code_as_it_is_laid_out():
    assert html_text(PAGE) == "Join\n\nA join of two tables <a>\nand more.\n\nSELECT *\n  FROM a;\n\none\ntwo\n\n x y\n"


def test_what_is_left_open_in_what_is_not_shown_ends_with_it():
    assert html_text('<div class="related"><p>a<div>b</div></div><p>c</p></nav>') == "c\n"


POD = """=encoding utf8

=head1 The B<OPEN> call

Use C<< $x->{"<"} >> or I<the C<F<file>>>, see L<open|perlfunc/open> and L<perlop>;X<index> E<lt>here E<233>.

    my $fh = <STDIN>;  # C<verbatim>

=over 4

=item *

=item C<$!>

=back

=begin html

<b>hidden</b>

=end html

=cut
"""


def test_pod_loses_its_codes_and_keeps_verbatim_paragraphs():
    assert pod_text(POD) == (
        'The OPEN call\n\nUse $x->{"<"} or the file, see open and perlop; <here é.\n\n    my $fh = <STDIN>;  # C<verbatim>\n\n*\n\n$!\n'
    )


GCIDE = """

00-database-short
   A dictionary

A \\A\\ ([=a]).
   The first letter.
   [1913 Webster]

   2. See {Alphabet}, and
      {Letter}.
      [1913 Webster +PJC]

         A line of verse.   --Pope.

Aardvark \\Aard"vark`\\, n. [D., earth-pig.] (Zool.)
   An edentate mammal [Obs.]
   [WordNet 1.5]
"""


def test_a_dictionary_gives_its_entries_without_pronunciations_and_marks_of_sources():
    assert list(gcide_entries(GCIDE)) == [
        ("A", "A ([=a]). The first letter.\n2. See Alphabet, and Letter.\nA line of verse. --Pope.\n"),
        ("Aardvark", "Aardvark, n. [D., earth-pig.] (Zool.) An edentate mammal [Obs.]\n"),
    ]


def test_a_synset_is_its_words_its_kind_and_its_gloss():
    data = (
        "  1 This software and database is being provided to you  \n"
        '00001740 00 a 02 able 0 up_to(p) 1 002 = 00002098 a 0101 + 05616246 n 0101 | having the means; "able to swim"  \n'
        "00005930 03 n 0a " + " ".join(f"w_{i} 0" for i in range(10)) + " 001 @ 00004475 n 0000 | small  \n"
    )
    assert list(wordnet_lines(data)) == [
        (0, 'able, up to (adjective): having the means; "able to swim"\n'),
        (3, ", ".join(f"w {i}" for i in range(10)) + " (noun): small\n"),
    ]


def test_verses_are_chapters_of_books_without_their_numbers():
    data = "A title.\nGe1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus.\n1Sm1:1 Now: there.\n"
    assert list(verses(data)) == [("Ge", "In the beginning. And the earth.\n\nThus.\n"), ("1Sm", "Now: there.\n")]
