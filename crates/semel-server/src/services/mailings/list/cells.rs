//! The writing of CSV for exports.

/// Appends one row by RFC 4180. A cell that a spreadsheet would run as a formula gets a leading `'`, as OWASP advises
/// ("CSV injection"): the lists that we export contain text from strangers.
pub(crate) fn write_row(out: &mut Vec<u8>, cells: &[&str]) {
    for (index, cell) in cells.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let guard = if is_formula(cell) { "'" } else { "" };
        // One empty cell alone would be a blank line, which readers skip.
        if needs_quotes(cell) || (cells.len() == 1 && cell.is_empty()) {
            out.push(b'"');
            out.extend_from_slice(guard.as_bytes());
            for byte in cell.bytes() {
                if byte == b'"' {
                    out.push(b'"');
                }
                out.push(byte);
            }
            out.push(b'"');
        } else {
            out.extend_from_slice(guard.as_bytes());
            out.extend_from_slice(cell.as_bytes());
        }
    }
    out.extend_from_slice(b"\r\n");
}

/// A line feed and the full-width signs, which some spreadsheets take for the plain ones, are on OWASP's list, too.
fn is_formula(cell: &str) -> bool {
    cell.starts_with(['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠'])
}

/// Also for `;` and tab: in countries with a decimal comma, spreadsheets split at `;`, and the second half of a cell
/// could begin a formula.
fn needs_quotes(cell: &str) -> bool {
    cell.contains([',', ';', '\t', '"', '\r', '\n']) || cell.starts_with(' ') || cell.ends_with(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> String {
        let mut out = Vec::new();
        write_row(&mut out, cells);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn plain_cells_are_written_without_quotes() {
        assert_eq!(row(&["a@x.com", "Ann", ""]), "a@x.com,Ann,\r\n");
    }

    #[test]
    fn delimiters_quotes_and_line_breaks_are_quoted() {
        assert_eq!(row(&["a,b", "c;d", "e\"f", "g\nh", " i"]), "\"a,b\",\"c;d\",\"e\"\"f\",\"g\nh\",\" i\"\r\n");
    }

    #[test]
    fn a_single_empty_cell_is_not_a_blank_line() {
        assert_eq!(row(&[""]), "\"\"\r\n");
    }

    #[test]
    fn formulas_are_disarmed() {
        for (cell, written) in [
            ("=1+1", "'=1+1"),
            ("+a@x.com", "'+a@x.com"),
            ("-1", "'-1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("\t=1", "\"'\t=1\""),
            ("\r=1", "\"'\r=1\""),
            ("=HYPERLINK(\"x\",1)", "\"'=HYPERLINK(\"\"x\"\",1)\""),
            ("a=1", "a=1"),
        ] {
            assert_eq!(row(&[cell, "x"]), format!("{written},x\r\n"));
        }
    }
}
