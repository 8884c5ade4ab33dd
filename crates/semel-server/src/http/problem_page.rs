//! `GET /problems/{name}`: the page of a problem's `type`, for people.

use axum::{
    extract::{Path, rejection::PathRejection},
    http::header,
    response::{Html, IntoResponse},
};

use super::problem::{Kind, NOT_FOUND, Problem, all};

/// A page without scripts, images or frames allows none of them.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'";

pub(super) async fn show(name: Result<Path<String>, PathRejection>) -> Result<impl IntoResponse, Problem> {
    // A path that is not UTF-8 names no problem.
    let kind = name
        .ok()
        .and_then(|Path(name)| all().find(|kind| kind.name == name))
        .ok_or_else(|| Problem::new(&NOT_FOUND).detail("There is no problem of this name."))?;
    Ok(([(header::CONTENT_SECURITY_POLICY, POLICY)], Html(page(kind))))
}

// The registry's texts contain no HTML markup; a test checks it.
fn page(kind: &Kind) -> String {
    let Kind { name, status, retryable, title, meaning, remedy } = kind;
    let again = if *retryable { "The same request may succeed later." } else { "The same request will fail again." };
    format!(
        r#"<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title} - Semel</title>
<style>
  body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }}
  code {{ font-size: 1.05em; }}
  @media (prefers-color-scheme: dark) {{ body {{ background: #16181d; color: #e6e6e6; }} }}
</style>
<h1>{title}</h1>
<p><code>{name}</code>, HTTP status {status}</p>
<p>{meaning}</p>
<p>{remedy}</p>
<p>{again}</p>
</html>
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_the_registry_is_markup() {
        for kind in all() {
            for text in [kind.name, kind.title, kind.meaning, kind.remedy] {
                assert!(!text.contains(['<', '>', '&']), "{text}");
            }
        }
    }
}
