//! Whole files through shape and rows.

use proptest::prelude::*;

use super::broken::Broken;
use super::rows::{Kind, Place, Row, Rows};
use super::shape::Shape;

/// The rows, each with the place after it, and how the file ended.
type Reading = (Vec<(Row, Place)>, Result<Place, Broken>);

fn read(shape: &Shape, mut rows: Rows, chunks: &[&[u8]]) -> Reading {
    let mut read = Vec::new();
    for index in 0..=chunks.len() {
        match chunks.get(index) {
            Some(chunk) => rows.feed(chunk),
            None => rows.finish(),
        }
        loop {
            match rows.next() {
                Ok(Some(row)) => read.push((row, rows.place())),
                Ok(None) => break,
                Err(broken) => return (read, Err(broken)),
            }
        }
    }
    assert!(rows.place().offset >= shape.skip);
    (read, Ok(rows.place()))
}

fn whole(text: &[u8]) -> Reading {
    let shape = Shape::look(&text[..text.len().min(64 << 10)], text.len() <= 64 << 10, None).unwrap();
    read(&shape, Rows::new(&shape), &[&text[shape.skip as usize..]])
}

/// Lines and addresses, or the codes of rejects.
fn brief(text: impl AsRef<[u8]>) -> Vec<(u64, String)> {
    let (rows, end) = whole(text.as_ref());
    end.unwrap();
    let word = |row: Row| match row.kind {
        Kind::Entry { email, .. } => email.normal,
        Kind::Reject { code, .. } => code.to_owned(),
    };
    rows.into_iter().map(|(row, _)| (row.line, word(row))).collect()
}

fn lines(expected: &[(u64, &str)]) -> Vec<(u64, String)> {
    expected.iter().map(|&(line, word)| (line, word.to_owned())).collect()
}

fn values(text: &str) -> Vec<Vec<String>> {
    let value = |(row, _): (Row, Place)| match row.kind {
        Kind::Entry { values, .. } => values,
        Kind::Reject { code, .. } => panic!("{code}"),
    };
    whole(text.as_bytes()).0.into_iter().map(value).collect()
}

fn end(text: impl AsRef<[u8]>) -> (&'static str, Option<u64>) {
    // A small file may be found broken by its shape.
    let text = text.as_ref();
    let first = &text[..text.len().min(64 << 10)];
    let shape = Shape::look(first, text.len() <= 64 << 10, None);
    let broken = shape.map_or_else(|broken| broken, |_| whole(text).1.unwrap_err());
    (broken.code, broken.line)
}

#[test]
fn every_kind_of_line_break_ends_a_row_and_counts_once() {
    let expected = lines(&[(2, "a@x.com"), (3, "b@x.com")]);
    for text in ["email\r\na@x.com\r\nb@x.com\r\n", "email\na@x.com\nb@x.com", "email\ra@x.com\rb@x.com\r"] {
        assert_eq!(brief(text), expected, "{text:?}");
    }
    let mixed = "\u{feff}email\r\na@x.com\rb@x.com\n\r\n\rc@x.com";
    assert_eq!(brief(mixed), lines(&[(2, "a@x.com"), (3, "b@x.com"), (6, "c@x.com")]));
}

#[test]
fn quoted_cells_keep_line_breaks_delimiters_and_quotes() {
    let text = "email,note\na@x.com,\"one\r\ntwo\rthree, \"\"four\"\"\"\nb@x.com,\"\"\n";
    assert_eq!(values(text), [["a@x.com", "one\r\ntwo\rthree, \"four\""], ["b@x.com", ""]]);
    assert_eq!(brief(text), lines(&[(2, "a@x.com"), (5, "b@x.com")]));
}

#[test]
fn values_are_trimmed_and_stand_by_column() {
    assert_eq!(values("name;email\n Ann ;\u{a0}A@x.com \n"), [["Ann", "A@x.com"]]);
}

#[test]
fn a_sep_line_counts_as_a_line() {
    assert_eq!(brief("sep=;\nemail;n\na@x.com;1\n"), lines(&[(3, "a@x.com")]));
}

#[test]
fn a_file_without_a_header_loses_no_row() {
    assert_eq!(brief("\na@x.com\nb@x.com"), lines(&[(2, "a@x.com"), (3, "b@x.com")]));
}

#[test]
fn blank_rows_are_skipped_and_counted() {
    let (rows, end) = whole(b"email,n\n\na@x.com,1\n,\n  , \r\n\"\"\nb@x.com,2\n\n");
    let place = end.unwrap();
    assert_eq!((rows.len(), place.rows, place.blank), (2, 2, 5));
    assert_eq!(rows[1].0.line, 7);
}

#[test]
fn empty_cells_too_many_are_fine_and_filled_ones_are_not() {
    let text = "email,n\na@x.com,1,,,\nb@x.com,2,3\nc@x.com\nd@x.com,\n";
    let expected = [(2, "a@x.com"), (3, "wrong-number-of-columns"), (4, "wrong-number-of-columns"), (5, "d@x.com")];
    assert_eq!(brief(text), lines(&expected));
    assert_eq!(values("email,n,,,\na@x.com,1\n"), [["a@x.com", "1"]]);
}

#[test]
fn a_reject_names_the_column_the_code_and_the_value() {
    let long = "x".repeat(300);
    let text = format!("E-Mail;n\nnope;1\n{long};2\n;3\na@x.com;4;5\n");
    let kinds: Vec<Kind> = whole(text.as_bytes()).0.into_iter().map(|(row, _)| row.kind).collect();
    let reject = |column: Option<&str>, code, value: &str| {
        let column = column.map(str::to_owned);
        Kind::Reject { column, code, value: value.to_owned() }
    };
    assert_eq!(kinds[0], reject(Some("E-Mail"), "no-at-sign", "nope"));
    assert_eq!(kinds[1], reject(Some("E-Mail"), "no-at-sign", &long[..200]));
    assert_eq!(kinds[2], reject(Some("E-Mail"), "empty-address", ""));
    assert_eq!(kinds[3], reject(None, "wrong-number-of-columns", "a@x.com;4;5"));
}

#[test]
fn a_reject_has_only_the_beginning_of_a_long_name_of_a_column() {
    let name = format!("email{}", ".".repeat(60_000));
    let (rows, _) = whole(format!("{name}\nnope\n").as_bytes());
    let Kind::Reject { column, .. } = &rows[0].0.kind else { panic!("{rows:?}") };
    assert_eq!(column.as_deref(), Some(&name[..200]));
}

#[test]
fn an_unclosed_quote_is_reported_where_it_opened() {
    assert_eq!(end("email,n\na@x.com,\"x\ny\"\nb@x.com,\"z\n\nc@x.com,1\n"), ("unclosed-quote", Some(4)));
    assert_eq!(end("email,n,m\na@x.com,\"x\ny\",\"z"), ("unclosed-quote", Some(3)));
    assert_eq!(end("email,n\na@x.com,\""), ("unclosed-quote", Some(2)));
}

#[test]
fn an_unclosed_quote_in_a_large_file_is_a_field_too_long() {
    let text = format!("email,n\na@x.com,\"1\n{}", "b@x.com,1\n".repeat(10_000));
    assert_eq!(end(text), ("field-too-long", Some(2)));
}

#[test]
fn a_cell_may_have_64_kib_and_a_row_256() {
    let cells = |count: usize, size: usize| {
        format!("email,a,b,c,d\nx@x.com{}\n", format!(",{}", "a".repeat(size)).repeat(count))
    };
    assert_eq!(brief(cells(4, 65_000)).len(), 1);
    assert_eq!(end(cells(4, 65_537)), ("field-too-long", Some(2)));
    assert_eq!(end(cells(4, 65_536)), ("row-too-long", Some(2)));
    assert_eq!(end(format!("email\na@x.com{}\n", ",".repeat(300_000))), ("row-too-long", Some(2)));
}

#[test]
fn a_last_row_of_any_size_is_read_or_found_unclosed() {
    // Around the initial sizes of the buffers for text and for cells.
    for size in 4_080..4_100 {
        let cell = "x".repeat(size);
        assert_eq!(brief(format!("email,n\na@x.com,{cell}")), lines(&[(2, "a@x.com")]));
        assert_eq!(end(format!("email,n\na@x.com,\"{cell}")), ("unclosed-quote", Some(2)));
    }
    for count in 60..70 {
        let file = format!("email{}n\na@x.com{}", ",".repeat(count), ",".repeat(count));
        assert_eq!(brief(file), lines(&[(2, "a@x.com")]));
    }
}

#[test]
fn the_limits_do_not_depend_on_the_chunks() {
    let shape = Shape::look(b"email,n\n", false, None).unwrap();
    for (cells, size) in [(1, 65_536), (1, 65_537), (3, 65_537), (4, 65_536), (5, 60_000), (9, 30_000), (300_000, 0)] {
        let data = format!("a@x.com{}\nb@x.com,1\n", format!(",{}", "a".repeat(size)).repeat(cells)).into_bytes();
        let expected = read(&shape, Rows::new(&shape), &[&data]);
        for chunk in [1_000, 4_096, 65_536, 262_144] {
            let chunks: Vec<&[u8]> = data.chunks(chunk).collect();
            assert_eq!(read(&shape, Rows::new(&shape), &chunks), expected, "{cells} cells of {size} by {chunk}");
        }
    }
}

#[test]
fn bytes_that_are_no_text_break_the_file_at_their_line() {
    let rows = "a@x.com,1\n".repeat(7_000);
    let file = |last: &[u8]| [b"email,n\n", rows.as_bytes(), last].concat();
    assert_eq!(end(file(b"b@x.com,\"\n\xe3o\"\n")), ("not-utf8", Some(7_003)));
    assert_eq!(end(file(b"b@x.com\xc3,\xa9\n")), ("not-utf8", Some(7_002)));
    assert_eq!(end(file(b"b@x.com,\0\n")), ("nul-bytes", Some(7_002)));
}

#[test]
fn a_broken_file_stays_broken() {
    let shape = Shape::look(b"email\na@x.com\n", true, None).unwrap();
    let mut rows = Rows::new(&shape);
    rows.feed(b"\0\na@x.com\n");
    assert_eq!(rows.next().unwrap_err(), rows.next().unwrap_err());
}

/// Pieces that are likely to meet at the edges of chunks.
fn file() -> impl Strategy<Value = Vec<u8>> {
    let pieces: [&[u8]; 17] = [
        b"a@x.com,1",
        b"b@x.com",
        b"\xc3\xbc@x.de",
        b",",
        b"\n",
        b"\r\n",
        b"\r",
        b"\"",
        b"\"\"",
        b"\"q\r\n,\",",
        b" ",
        b"\xef\xbb\xbf",
        b"x",
        b"\xc3",
        b",\"\r\"",
        b"c@x.com,2\r\n",
        b"d@x.com,\"\n\"\r",
    ];
    // Bytes that break the file are rare, so that most files are read to their end.
    let weights = |index: usize| if matches!(index, 7 | 13) { 1 } else { 12 };
    let pieces = pieces.into_iter().enumerate().map(|(index, piece)| (weights(index), Just(piece)));
    let piece = prop::strategy::Union::new_weighted(pieces.collect());
    prop::collection::vec(piece, 0..40).prop_map(|pieces| [b"email,n\n".as_slice(), &pieces.concat()].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn rows_do_not_depend_on_the_chunks(file in file(), sizes in prop::collection::vec(1..9usize, 1..200)) {
        let shape = Shape::look(b"email,n\n", false, None).unwrap();
        let data = &file[shape.skip as usize..];
        let expected = read(&shape, Rows::new(&shape), &[data]);
        let mut chunks = Vec::new();
        let mut rest = data;
        for size in sizes {
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            chunks.push(chunk);
            rest = after;
        }
        chunks.push(rest);
        prop_assert_eq!(&read(&shape, Rows::new(&shape), &chunks), &expected);
        let bytes: Vec<&[u8]> = data.chunks(1).collect();
        prop_assert_eq!(&read(&shape, Rows::new(&shape), &bytes), &expected);
    }

    #[test]
    fn reading_resumes_after_any_row(file in file()) {
        let shape = Shape::look(b"email,n\n", false, None).unwrap();
        let (rows, end) = read(&shape, Rows::new(&shape), &[&file[shape.skip as usize..]]);
        for (index, (_, place)) in rows.iter().enumerate() {
            let rest = &file[place.offset as usize..];
            let (after, end_after) = read(&shape, Rows::resume(&shape, *place), &[rest]);
            prop_assert_eq!(&after[..], &rows[index + 1..]);
            prop_assert_eq!(&end_after, &end);
        }
    }
}
