use super::super::template::{Mistake, Templates, variables};

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
    let many = "{{ a }}".repeat(15_000);
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
fn a_column_does_not_hide_a_built_in_variable() {
    let columns = ["email", "unsubscribe_url", "name"].map(str::to_owned);
    let values = ["Ana@Example.com", "https://elsewhere.example", "Ana"].map(str::to_owned);
    let source = "{{ name }} {{ email }} {{ unsubscribe_url }}";
    let vars = variables(&columns, &values, "ana@example.com", Some("https://ours.example/u/1"));
    assert_eq!(text(source, &vars).as_deref(), Ok("Ana ana@example.com https://ours.example/u/1"));
    assert_eq!(text(source, &variables(&columns, &values, "a@b.c", None)).as_deref(), Ok("Ana a@b.c "));
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

/// An import tries every row before anything is sent, and the shortcut must not let a row pass that cannot be rendered.
#[test]
fn a_row_that_is_tried_fails_exactly_if_it_cannot_be_rendered() {
    let sources = [
        "{{ a }}",
        "{{ a|upper }} {{ b|d('x')|title }}",
        "{{ a|int }}",
        "{{ a|urlencode|urlencode }}",
        "{{ a|d }}",
        "{{ a|replace(b, a) }}",
        "{{ a if b }}",
        "{{ a if b else 'x' }}",
        "{{ (a == b)|trim }}",
        "{{ -a }}",
        "{{ a in b }} {{ a < b }}",
        "{% if a|length %}{{ b|lower }}{% elif not b %}{{ b|float }}{% endif %}",
        &"{{ a }}".repeat(60),
        &"{{ a }}".repeat(15_000),
        &"x".repeat(1 << 20),
    ];
    let long = ["x".repeat(30 << 10), "<".repeat(20 << 10), "\u{390}".repeat(15 << 10), "y".repeat(70 << 10)];
    let values = ["", "1", "1.5", "ana", "a\nb"].into_iter().chain(long.iter().map(String::as_str));
    let values: Vec<&str> = values.collect();
    for source in sources {
        for (text, html) in [(Some(source), None), (None, Some(source)), (Some("x {{ a }}{{ b }}"), None)] {
            let templates = Templates::parse("s {{ b }}", text, html).unwrap();
            for (a, b) in values.iter().flat_map(|a| values.iter().map(move |b| (*a, *b))) {
                let vars = [("a", a), ("b", b)];
                let name = || format!("{} with {:?}, {:?}", &source[..source.len().min(60)], a.len(), b.len());
                assert_eq!(templates.try_out(&vars), templates.render(&vars).map(drop), "{}", name());
            }
        }
    }
}

/// Threads of the server have 2 MiB. A process whose stack overflows ends, and with it this test.
#[test]
fn no_template_is_too_deep_for_the_stack() {
    let shapes: [(&str, &dyn Fn(usize) -> String); 12] = [
        ("not", &|n| format!("{{{{ {}a }}}}", "not ".repeat(n))),
        ("minus", &|n| format!("{{{{ {}1 }}}}", "- ".repeat(n))),
        ("or", &|n| format!("{{{{ a{} }}}}", " or a".repeat(n))),
        ("and", &|n| format!("{{% if a{} %}}{{% endif %}}", " and a".repeat(n))),
        ("compare", &|n| format!("{{{{ a{} }}}}", " == a".repeat(n))),
        ("plus", &|n| format!("{{{{ a{} }}}}", " + a".repeat(n))),
        ("attribute", &|n| format!("{{{{ a{} }}}}", ".b".repeat(n))),
        ("call", &|n| format!("{{{{ a{} }}}}", "()".repeat(n))),
        ("filter", &|n| format!("{{{{ a{} }}}}", "|d".repeat(n))),
        ("test", &|n| format!("{{{{ a{} }}}}", " is b".repeat(n))),
        ("else", &|n| format!("{{{{ a{} }}}}", " if a else a".repeat(n))),
        ("elif", &|n| format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(n))),
    ];
    for (name, shape) in shapes {
        let [deep, short] = [200_000, 20].map(shape);
        let deepest = [490, 245, 120].map(shape);
        let parse = move || {
            let refused = |source: &str| Templates::parse("s", Some(source), None).is_err();
            assert!(refused(&deep), "{name}");
            // As deep as the limits allow, whatever the answer is.
            deepest.iter().for_each(|source| drop(Templates::parse("s", Some(source), None)));
            assert!(["plus", "attribute", "call", "test"].contains(&name) || !refused(&short), "{name}");
        };
        std::thread::Builder::new().stack_size(2 << 20).spawn(parse).unwrap().join().unwrap();
    }
}

#[test]
fn the_deepest_template_that_is_allowed_fits_into_the_stack() {
    let parts = |open: &str, close: &str, n: usize| (open.repeat(n), close.repeat(n));
    let (ifs, ends) = parts("{% if not not not not a %}", "{% endif %}", 25);
    let (open, close) = parts("(not not ", ")", 50);
    let elifs = "{% elif a %}".repeat(200);
    let source = format!("{ifs}{elifs}{{{{ {open}a{close} }}}}{ends}");
    let parse = move || Templates::parse("s", Some(&source), Some(&source)).is_ok();
    assert!(std::thread::Builder::new().stack_size(2 << 20).spawn(parse).unwrap().join().unwrap());
}
