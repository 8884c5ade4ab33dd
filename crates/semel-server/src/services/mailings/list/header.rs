//! The first row of a list: whether it is a header, and which column has the addresses.

use std::collections::HashSet;

use super::address::Email;
use super::broken::Broken;
use super::text::{excerpt, fold};

/// Names of the address column, folded: see [`fold`].
const ALIASES: [&str; 34] = [
    "email",
    "emails",
    "mail",
    "emailaddress",
    "emailaddresses",
    "mailaddress",
    "emailid",
    "correo",
    "correoelectronico",
    "correoe",
    "direcciondecorreo",
    "direcciondecorreoelectronico",
    "direcciondeemail",
    "direccionemail",
    "enderecodeemail",
    "enderecoemail",
    "enderecoeletronico",
    "correioeletronico",
    "indirizzoemail",
    "indirizzodiposta",
    "indirizzodipostaelettronica",
    "postaelettronica",
    "adresseemail",
    "adressemail",
    "adressedemessagerie",
    "adresseelectronique",
    "courriel",
    "emailadresse",
    "mailadresse",
    "emailadres",
    "adresemail",
    "epost",
    "epostadress",
    "eposta",
];

/// More columns than any list needs. The names are stored with each checkpoint of an import.
const MAX_COLUMNS: usize = 500;

/// What the first row says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// The names as the file writes them, if the first row is a header.
    pub(super) header: Option<Vec<String>>,
    /// The names of the template variables.
    pub(super) columns: Vec<String>,
    /// The column of the addresses.
    pub(super) email: usize,
}

/// Reads the first row. `wanted`: the address column by name or by number, if the client said which.
pub(super) fn read(row: &[&str], wanted: Option<&str>) -> Result<Head, Broken> {
    let addresses = indexes(row, |cell| Email::parse(cell).is_ok());
    let numbers: Vec<String> = (1..=row.len()).map(|n| format!("col{n}")).collect();
    // If the client says where the addresses are, an invalid one there is a bad row and not a header.
    let chosen = wanted.and_then(|wanted| named(wanted, &numbers).ok());
    let is_header = addresses.is_empty() && !chosen.is_some_and(|index| row[index].contains('@'));

    // Cells without a name at the end are left-overs of a spreadsheet.
    let named_cells = row.iter().rposition(|cell| !cell.is_empty()).map_or(0, |last| last + 1);
    let header: Option<Vec<String>> =
        is_header.then(|| row[..named_cells].iter().map(|&cell| cell.to_owned()).collect());
    let labels = header.as_ref().unwrap_or(&numbers);
    if labels.len() > MAX_COLUMNS {
        let message = format!("the file has {} columns, and at most {MAX_COLUMNS} are read", labels.len());
        return Err(Broken::new("too-many-columns", message));
    }
    let email = match wanted {
        Some(wanted) => named(wanted, labels)?,
        None if is_header => only(&indexes(labels, |label| ALIASES.contains(&fold(label).as_str())), labels)?,
        None => only(&addresses, labels)?,
    };
    let columns = variables(labels);
    Ok(Head { header, columns, email })
}

fn indexes<T: AsRef<str>>(cells: &[T], fits: impl Fn(&str) -> bool) -> Vec<usize> {
    (0..cells.len()).filter(|&index| fits(cells[index].as_ref())).collect()
}

/// The column that the client named: by its name, else by its number from 1.
fn named(wanted: &str, labels: &[String]) -> Result<usize, Broken> {
    let folded = fold(wanted);
    // A name of signs only folds to nothing and would match all such names.
    let found = indexes(labels, |label| label == wanted.trim() || (!folded.is_empty() && fold(label) == folded));
    if !found.is_empty() {
        return only(&found, labels);
    }
    let number = wanted.trim().parse::<usize>().ok().and_then(|number| number.checked_sub(1));
    number.filter(|&index| index < labels.len()).ok_or_else(|| {
        let wanted = excerpt(wanted, 50);
        Broken::new(
            "unknown-column",
            format!("there is no column \"{wanted}\"; the columns are {}", list(labels, None)),
        )
    })
}

fn only(found: &[usize], labels: &[String]) -> Result<usize, Broken> {
    match found {
        [index] => Ok(*index),
        [] => {
            let message = format!("no column is named like \"email\"; the columns are {}", list(labels, None));
            Err(Broken::new("no-address-column", message))
        }
        several => {
            let message =
                format!("several columns could have the addresses: {}; say which", list(labels, Some(several)));
            Err(Broken::new("ambiguous-address-column", message))
        }
    }
}

/// The first labels, each with its number, since two of them may be equal.
fn list(labels: &[String], only: Option<&[usize]>) -> String {
    const SHOWN: usize = 20;
    let is_listed = |index: &usize| only.is_none_or(|only| only.contains(index));
    let listed: Vec<usize> = (0..labels.len()).filter(is_listed).collect();
    let show = |&index: &usize| format!("{} \"{}\"", index + 1, excerpt(&labels[index], 50));
    let more = if listed.len() > SHOWN { ", and more" } else { "" };
    listed.iter().take(SHOWN).map(show).collect::<Vec<_>>().join(", ") + more
}

/// Names that a template can use: `First name` is `first_name`. A second `name` is `name_2`.
fn variables(labels: &[String]) -> Vec<String> {
    let mut taken = HashSet::new();
    let mut variables = Vec::with_capacity(labels.len());
    for (index, label) in labels.iter().enumerate() {
        let name = label.to_lowercase();
        let words: Vec<&str> = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
        let name = if words.is_empty() { format!("col{}", index + 1) } else { words.join("_") };
        let mut unique = name.clone();
        let mut number = 2;
        while !taken.insert(unique.clone()) {
            unique = format!("{name}_{number}");
            number += 1;
        }
        variables.push(unique);
    }
    variables
}
