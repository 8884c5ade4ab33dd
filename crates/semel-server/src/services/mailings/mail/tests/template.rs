use super::super::template::{Mistake, Templates};

fn fields(mistakes: &[Mistake]) -> Vec<&str> {
    mistakes.iter().map(|mistake| mistake.field).collect()
}

fn text(source: &str, vars: &[(&str, &str)]) -> Result<String, String> {
    Templates::parse("s", Some(source), None).unwrap().render(vars).map(|rendered| rendered.text.unwrap())
}

#[test]
fn values_are_escaped_in_html_only() {
    let all = "{{ name }}";
    let rendered = Templates::parse(all, Some(all), Some(all)).unwrap().render(&[("name", "<b>&'\"")]).unwrap();
    assert_eq!(rendered.subject, "<b>&'\"");
    assert_eq!(rendered.text.unwrap(), "<b>&'\"");
    assert_eq!(rendered.html.unwrap(), "&lt;b&gt;&amp;&#x27;&quot;");
}

#[test]
fn every_field_reports_its_mistake_with_the_line() {
    let mistakes = Templates::parse("{{ a", Some("one\n{% if a %}"), Some("a\n\n{{ b|nonsense }}")).unwrap_err();
    assert_eq!(fields(&mistakes), ["subject", "body", "html"]);
    assert!(mistakes[1].message.contains("line 2"), "{mistakes:?}");
    assert_eq!(mistakes[2].message, "syntax error: there is no filter 'nonsense' (line 3)");
    assert_eq!(fields(&Templates::parse("s", None, None).unwrap_err()), ["body"]);
}

#[test]
fn the_language_has_no_part_that_can_loop_or_grow() {
    for source in [
        "{% for x in a %}{% endfor %}",
        "{% set a = a %}",
        "{% set a %}x{% endset %}",
        "{% with a = a %}{% endwith %}",
        "{% autoescape false %}{% endautoescape %}",
        "{% filter upper %}{% endfilter %}",
        "{% do a %}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% macro m() %}{% endmacro %}",
        "{{ a ~ a }}",
        "{{ 'x' * 1000000000 }}",
        "{{ range(10) }}",
        "{{ a.b }}",
        "{{ a['b'] }}",
        "{{ a[1:] }}",
        "{{ a.upper() }}",
        "{{ [a, a] }}",
        "{{ {'a': a} }}",
        "{{ a is defined }}",
        "{{ a|safe }}",
        "{{ a|default(value='x') }}",
        "{{ a in [a, a] }}",
    ] {
        assert!(Templates::parse("s", None, Some(source)).is_err(), "{source}");
    }
    let deep = format!("{}a{}", "{{ (".to_owned() + &"(".repeat(10_000), ")".repeat(10_001) + " }}");
    assert!(Templates::parse("s", Some(&deep), None).is_err());
}

#[test]
fn a_render_is_bounded_in_instructions_values_and_output() {
    let many = "{% if a %}{% endif %}".repeat(20_000);
    assert!(text(&many, &[("a", "x")]).unwrap_err().contains("fuel"));
    let many = "{{ a|upper }}".repeat(501);
    assert!(Templates::parse("s", Some(&many), None).unwrap_err()[0].message.contains("500 filters"));
    let long = "x".repeat(60 << 10);
    assert!(text(&"{{ a }}".repeat(20), &[("a", &long)]).unwrap_err().contains("1024 KiB"));
    let grown = text("{{ a|replace('x', a)|replace('x', a) }}", &[("a", &long)]);
    assert!(grown.unwrap_err().contains("too long"));
    assert!(text("{{ a }}", &[("a", &"x".repeat(65 << 10))]).unwrap_err().contains("64 KiB"));
}

#[test]
fn missing_lists_variables_that_no_column_and_no_built_in_provides_with_their_fields() {
    let source = "{{ email }} {% if plan == 'pro' %}{{ name }}{% endif %} {{ unsubscribe_url }}";
    let templates = Templates::parse("{{ title|default(code) }}", Some(source), None).unwrap();
    let missing = templates.missing(&["name".to_owned(), "other".to_owned()]);
    assert_eq!(missing, [("subject", "code"), ("subject", "title"), ("body", "plan")]);
}

#[test]
fn a_recipient_without_a_used_value_is_not_rendered() {
    assert!(text("{{ name }}", &[("other", "x")]).unwrap_err().contains("\"name\""));
}

#[test]
fn a_subject_with_a_control_character_or_over_998_bytes_is_refused() {
    let templates = Templates::parse("Hi {{ name }}", Some("x"), None).unwrap();
    for name in ["a\r\nBcc: all@example.org", "a\nb", "a\rb", "a\0b", "a\u{85}b", &"x".repeat(996)] {
        assert!(templates.render(&[("name", name)]).unwrap_err().starts_with("subject"), "{name:?}");
    }
    assert_eq!(templates.render(&[("name", &"x".repeat(995))]).unwrap().subject.len(), 998);
}

#[test]
fn filters_and_conditions_work_on_text() {
    let vars = [("name", "joão da silva"), ("nick", ""), ("total", " 12 "), ("plan", "pro")];
    for (source, result) in [
        ("{{ name|title }}", "João Da Silva"),
        ("{{ name|capitalize }}", "João da silva"),
        ("{{ name|upper|lower|trim }}", "joão da silva"),
        ("{{ nick|default('friend') }}", "friend"),
        ("{{ nick or name }}", "joão da silva"),
        ("{{ name|replace('da', 'de')|length }}", "13"),
        ("{{ 'big' if total|int > 9 else 'small' }}", "big"),
        ("{% if plan in ['pro', 'max'] and not nick %}yes{% else %}no{% endif %}\n", "yes\n"),
        ("{{ name|urlencode }}", "jo%C3%A3o%20da%20silva"),
        ("{% raw %}{{ name }}{% endraw %}", "{{ name }}"),
    ] {
        assert_eq!(text(source, &vars).as_deref(), Ok(result), "{source}");
    }
    assert!(text("{{ name|int }}", &vars).unwrap_err().contains("whole number"));
}
