use super::*;

fn look(text: impl AsRef<[u8]>) -> Shape {
    Shape::look(text.as_ref(), true, None).unwrap_or_else(|broken| panic!("{broken:?}"))
}

fn broken(text: impl AsRef<[u8]>, column: Option<&str>) -> Broken {
    Shape::look(text.as_ref(), true, column).unwrap_err()
}

#[test]
fn each_delimiter_is_found() {
    for delimiter in [',', ';', '\t', '|'] {
        let shape = look(format!("name{delimiter}email\nAnn{delimiter}a@x.com\n"));
        assert_eq!((shape.delimiter, shape.email), (delimiter as u8, 1));
        assert_eq!(shape.columns, ["name", "email"]);
    }
}

#[test]
fn commas_within_the_cells_of_a_semicolon_file_do_not_win() {
    let shape = look("email;name\na@x.com;Doe, John, Dr\nb@x.com;Roe, Jane, Dr\n");
    assert_eq!((shape.delimiter, shape.columns.len()), (b';', 2));
}

#[test]
fn a_single_column_needs_no_delimiter() {
    let shape = look("Email\na@x.com\nb@x.com");
    assert_eq!((shape.delimiter, shape.email, shape.skip, shape.line), (b',', 0, 6, 2));
    assert_eq!(look("email\na@x.com;;\n").delimiter, b';');
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let shape = look("\u{feff}email,name\r\na@x.com,Ann");
    assert_eq!((shape.skip, shape.line), (15, 2));
    assert_eq!(shape.header, Some(vec!["email".into(), "name".into()]));
    assert_eq!(look("\u{feff}a@x.com\n").skip, 3);
}

#[test]
fn a_sep_line_gives_the_delimiter_and_is_skipped() {
    for (text, delimiter) in [
        ("sep=;\r\nemail;a,b\r\na@x.com;1,2", b';'),
        ("\u{feff}SEP=|\nemail|b\na@x.com|1", b'|'),
        ("\"sep=,\"\nemail,b\na@x.com,1", b','),
        ("sep=\t\remail\tb\ra@x.com\t1", b'\t'),
    ] {
        let shape = look(text);
        assert_eq!((shape.delimiter, shape.line, shape.columns.len()), (delimiter, 3, 2), "{text:?}");
    }
    assert_eq!(broken("sep=x\nemail\na@x.com", None).code, "unknown-delimiter");
    assert_eq!(broken("sep=;", None).code, "empty");
}

#[test]
fn the_address_column_is_found_by_many_names() {
    for name in [
        "email",
        "E-Mail",
        "mail",
        "EMAIL ADDRESS",
        "e mail address",
        "EmailAddress",
        "e_mail",
        "correo",
        "Correo electrónico",
        "Endereço de e-mail",
        "Indirizzo email",
        "Adresse e-mail",
        "E-Mail-Adresse",
        "Courriel",
    ] {
        assert_eq!(look(format!("id,{name},name\n1,a@x.com,Ann\n")).email, 1, "{name}");
    }
}

#[test]
fn a_file_without_an_address_column_names_its_columns() {
    let broken = broken("id,name\n1,Ann\n", None);
    assert_eq!((broken.code, broken.line), ("no-address-column", Some(1)));
    assert!(broken.message.contains("1 \"id\", 2 \"name\""), "{broken}");
}

#[test]
fn two_address_columns_are_ambiguous_until_one_is_chosen() {
    let text = "Email,name,E-Mail\na@x.com,Ann,b@x.com\n";
    let error = broken(text, None);
    assert_eq!(error.code, "ambiguous-address-column");
    assert!(error.message.contains("1 \"Email\", 3 \"E-Mail\""), "{error}");
    assert_eq!(broken(text, Some("email")).code, "ambiguous-address-column");
    assert_eq!(Shape::look(text.as_bytes(), true, Some("E-Mail")).unwrap_err().code, "ambiguous-address-column");
    assert_eq!(Shape::look(text.as_bytes(), true, Some("3")).unwrap().email, 2);
    assert_eq!(broken("a@x.com,b@x.com\n", None).code, "ambiguous-address-column");
}

#[test]
fn the_client_chooses_the_column_by_name_or_number() {
    let look = |column| Shape::look(b"id,Contact Mail,x\n1,a@x.com,2\n", true, Some(column));
    assert_eq!(look("contact-mail").unwrap().email, 1);
    assert_eq!(look("2").unwrap().email, 1);
    for column in ["nope", "0", "4", "-", ""] {
        assert_eq!(look(column).unwrap_err().code, "unknown-column", "{column:?}");
    }
    assert_eq!(Shape::look(b"1,a@x.com\n", true, Some("col2")).unwrap().email, 1);
}

#[test]
fn an_address_in_the_first_row_means_no_header() {
    let shape = look("\n\nAnn;a@x.com;\nBob;b@x.com;x\n");
    assert_eq!((shape.header, shape.email, shape.skip, shape.line), (None, 1, 0, 1));
    assert_eq!(shape.columns, ["col1", "col2", "col3"]);
}

#[test]
fn an_invalid_address_in_the_chosen_column_is_a_row_and_not_a_header() {
    let shape = Shape::look(b"Ann,a@\nBob,b@x.com\n", true, Some("2")).unwrap();
    assert_eq!((shape.header, shape.email), (None, 1));
}

#[test]
fn variables_are_lower_case_and_unique() {
    let shape = look("Email,First Name,first-name,,Straße (1)!,first_name_2,,\na@x.com,1,2,3,4,5,,\n");
    assert_eq!(shape.columns, ["email", "first_name", "first_name_2", "col4", "straße_1", "first_name_2_2"]);
}

#[test]
fn blank_lines_before_the_header_are_skipped() {
    let shape = look("\r\n ,\n\nemail,b\n\na@x.com,1");
    assert_eq!((shape.skip, shape.line), (14, 5));
}

#[test]
fn a_file_without_rows_is_empty() {
    for text in ["", "\u{feff}", "\n\r\n\r", "  \n , ,\n", "email", "email,name\r\n\r\n"] {
        assert_eq!(broken(text, None).code, "empty", "{text:?}");
    }
    assert!(Shape::look(b"email,name\r\n", false, None).is_ok());
}

#[test]
fn latin_1_is_refused_with_the_line_and_a_guess() {
    let broken = broken(b"email,name\na@x.com,Ann\nb@x.com,Jo\xe3o\n", None);
    assert_eq!((broken.code, broken.line), ("not-utf8", Some(3)));
    assert!(broken.message.contains("Windows-1252"), "{broken}");
}

#[test]
fn a_character_cut_at_the_end_of_the_beginning_is_no_error() {
    let text = "email,name\na@x.com,João".as_bytes();
    let cut = &text[..text.len() - 2];
    assert!(Shape::look(cut, false, None).is_ok());
    assert_eq!(broken(cut, None).code, "not-utf8");
}

#[test]
fn files_that_are_no_text_are_refused() {
    assert_eq!(broken(b"PK\x03\x04 xl/", None).code, "is-xlsx");
    assert_eq!(broken(b"\xff\xfee\0", None).code, "not-utf8");
    let nul = broken(b"email\na@x.com\0\n", None);
    assert_eq!((nul.code, nul.line), ("nul-bytes", Some(2)));
}

#[test]
fn a_first_row_that_does_not_end_is_refused() {
    assert_eq!(broken("\n\"email\na@x.com\n", None).line, Some(2));
    assert_eq!(broken("\"email\na@x.com\n", None).code, "unclosed-quote");
    assert_eq!(Shape::look(b"\"email\na@x.com\n", false, None).unwrap_err().code, "first-row-too-long");
}

#[test]
fn too_many_columns_are_refused() {
    assert_eq!(broken(format!("email{}x\na@x.com\n", ",".repeat(600)), None).code, "too-many-columns");
}

#[test]
fn a_shape_survives_its_checkpoint() {
    let shape = look("email;name\na@x.com;Ann\n");
    let stored = serde_json::to_string(&shape).unwrap();
    assert_eq!(serde_json::from_str::<Shape>(&stored).unwrap(), shape);
}
