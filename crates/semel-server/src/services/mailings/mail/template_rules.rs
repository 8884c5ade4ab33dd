//! What a template may contain.
//!
//! Fuel counts instructions, not the size of their values. A few lines of full Jinja build gigabytes with it: loops
//! and assignments that double a string, `"x" * 1000000000`, or filters that pad. So templates are limited to
//! values, filters and conditions, in which every instruction runs at most once and no value grows beyond a bound.
//! The recipients' columns are flat text, so nothing is lost that a mailing could use.

use std::fmt::Write as _;

use minijinja::{
    Environment, Error, ErrorKind,
    machinery::{
        Token, WhitespaceConfig,
        ast::{BinOpKind, CallArg, CompareOpKind, Expr, Stmt, UnaryOpKind},
        parse, tokenize,
    },
    syntax::SyntaxConfig,
    value::Value,
};

/// The longest result of a filter in bytes: the same as that of the values, so that chains of filters stay linear.
const LONGEST: usize = 64 << 10;

/// Filters per template. The slowest one needs 0.3 ms for the longest text.
const MOST_FILTERS: usize = 500;

/// The words and signs of one tag, and the `elif` of a template. The parser, this check, the compiler and the end of the
/// syntax tree call themselves for each of many operators in a row (`not not …`, `a or a or …`, `a|d|d…`) and for each
/// `elif`; only brackets and nested `if` have a limit in minijinja. 200,000 of them overflow the stack, which ends the
/// process. These many fit into a quarter of the smallest stack that we use (2 MiB).
const MOST_TOKENS: usize = 500;
const MOST_ELIFS: usize = 200;

/// Tags per template: more than [`super::template`] renders. They bound the memory of the syntax tree.
const MOST_TAGS: usize = 20_000;

/// The filters of the language. An unknown one is a mistake of the template, not of the first recipient.
const FILTERS: [&str; 12] =
    ["capitalize", "d", "default", "float", "int", "length", "lower", "replace", "title", "trim", "upper", "urlencode"];

/// What is known of a template before it is rendered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    /// Words, signs and pieces of text; an instruction needs at least one.
    pub(super) tokens: usize,
    /// At most so many values are written.
    pub(super) tags: usize,
    /// Whether no expression can fail, whatever its values are, if they are short.
    pub(super) is_safe: bool,
}

/// Checks that a template stays within the language.
pub(super) fn check(source: &str) -> Result<Measure, Error> {
    let measure = measure(source)?;
    let root = parse(source, "template", SyntaxConfig, WhitespaceConfig::default())?;
    let mut check = Check { filters: 0, is_safe: true };
    check.statement(&root)?;
    Ok(Measure { is_safe: check.is_safe, ..measure })
}

/// Refuses a template that is too deep to be parsed. The tokenizer needs no stack. A mistake that it finds is reported by
/// the parser, which stops there, too.
fn measure(source: &str) -> Result<Measure, Error> {
    let (mut all, mut tokens, mut tags, mut elifs) = (0, 0, 0, 0);
    let read = tokenize(source, false, SyntaxConfig, WhitespaceConfig::default());
    for (token, span) in read.map_while(Result::ok) {
        let line = span.start_line;
        (all, tokens) = (all + 1, tokens + 1);
        match token {
            Token::VariableStart | Token::BlockStart => (tokens, tags) = (0, tags + 1),
            Token::Ident("elif") => elifs += 1,
            _ => {}
        }
        if tokens > MOST_TOKENS {
            return Err(refuse(&format!("more than {MOST_TOKENS} words and signs in one tag"), line));
        }
        if tags > MOST_TAGS {
            return Err(refuse(&format!("more than {MOST_TAGS} tags"), line));
        }
        if elifs > MOST_ELIFS {
            return Err(refuse(&format!("more than {MOST_ELIFS} times 'elif'"), line));
        }
    }
    Ok(Measure { tokens: all, tags, is_safe: false })
}

/// The state of one check.
struct Check {
    filters: usize,
    is_safe: bool,
}

impl Check {
    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::Template(all) => self.all(&all.children),
            Stmt::EmitRaw(_) => Ok(()),
            Stmt::EmitExpr(emit) => self.top(&emit.expr),
            Stmt::IfCond(cond) => {
                self.top(&cond.expr)?;
                self.all(&cond.true_body)?;
                self.all(&cond.false_body)
            }
            Stmt::ForLoop(s) => Err(refuse("loops are not supported", s.span().start_line)),
            Stmt::WithBlock(s) => Err(refuse("'with' is not supported", s.span().start_line)),
            Stmt::Set(s) => Err(refuse("'set' is not supported", s.span().start_line)),
            Stmt::SetBlock(s) => Err(refuse("'set' is not supported", s.span().start_line)),
            Stmt::AutoEscape(s) => Err(refuse("'autoescape' is not supported", s.span().start_line)),
            Stmt::FilterBlock(s) => Err(refuse("'filter' blocks are not supported", s.span().start_line)),
            Stmt::Do(s) => Err(refuse("'do' is not supported", s.span().start_line)),
            // Features of minijinja that another crate of the build may switch on.
            #[allow(unreachable_patterns)]
            _ => Err(refuse("this statement is not supported", 1)),
        }
    }

    fn all(&mut self, statements: &[Stmt<'_>]) -> Result<(), Error> {
        statements.iter().try_for_each(|s| self.statement(s))
    }

    /// The expression of a tag.
    fn top(&mut self, expression: &Expr<'_>) -> Result<(), Error> {
        self.is_safe &= is_safe(expression);
        self.expression(expression)
    }

    fn expression(&mut self, expression: &Expr<'_>) -> Result<(), Error> {
        let line = expression.span().start_line;
        match expression {
            Expr::Var(_) | Expr::Const(_) => Ok(()),
            Expr::UnaryOp(unary) => self.expression(&unary.expr),
            Expr::BinOp(binary) => self.binary(binary.op, &binary.left, &binary.right, line),
            Expr::Compare(compare) => {
                self.expression(&compare.expr)?;
                compare.ops.iter().try_for_each(|op| match op.op {
                    CompareOpKind::In | CompareOpKind::NotIn => self.set(&op.expr),
                    _ => self.expression(&op.expr),
                })
            }
            Expr::IfExpr(cond) => {
                self.expression(&cond.test_expr)?;
                self.expression(&cond.true_expr)?;
                cond.false_expr.as_ref().map_or(Ok(()), |e| self.expression(e))
            }
            Expr::Filter(filter) => {
                if !FILTERS.contains(&filter.name) {
                    return Err(refuse(&format!("there is no filter '{}'", filter.name), line));
                }
                self.filters += 1;
                if self.filters > MOST_FILTERS {
                    return Err(refuse(&format!("more than {MOST_FILTERS} filters"), line));
                }
                filter.expr.as_ref().map_or(Ok(()), |e| self.expression(e))?;
                filter.args.iter().try_for_each(|arg| match arg {
                    CallArg::Pos(value) => self.expression(value),
                    _ => Err(refuse("named arguments are not supported", line)),
                })
            }
            Expr::Test(_) => Err(refuse("'is' tests are not supported; use 'if name' or '=='", line)),
            Expr::Call(_) => Err(refuse("functions are not supported", line)),
            Expr::List(_) | Expr::Map(_) => Err(refuse("a list is only supported after 'in'", line)),
            Expr::GetAttr(_) | Expr::GetItem(_) | Expr::Slice(_) => {
                Err(refuse("values are plain text: they have no parts", line))
            }
        }
    }

    fn binary(&mut self, op: BinOpKind, left: &Expr<'_>, right: &Expr<'_>, line: u16) -> Result<(), Error> {
        use BinOpKind::{Eq, Gt, Gte, In, Lt, Lte, Ne, ScAnd, ScOr};
        self.expression(left)?;
        match op {
            In => self.set(right),
            Eq | Ne | Lt | Lte | Gt | Gte | ScAnd | ScOr => self.expression(right),
            _ => Err(refuse("arithmetic and '~' are not supported", line)),
        }
    }

    /// The right side of `in`: a text, or a list of constants.
    fn set(&mut self, expression: &Expr<'_>) -> Result<(), Error> {
        match expression {
            Expr::List(list) => list.items.iter().try_for_each(|item| match item {
                Expr::Const(_) => Ok(()),
                other => Err(refuse("a list may contain only constants", other.span().start_line)),
            }),
            other => self.expression(other),
        }
    }
}

/// Whether an expression cannot fail if its values are short. What is not known to be safe is not.
fn is_safe(expression: &Expr<'_>) -> bool {
    use BinOpKind::{Eq, Ne, ScAnd, ScOr};
    match expression {
        Expr::Var(_) | Expr::Const(_) => true,
        Expr::UnaryOp(unary) => matches!(unary.op, UnaryOpKind::Not) && is_safe(&unary.expr),
        Expr::BinOp(binary) => {
            matches!(binary.op, Eq | Ne | ScAnd | ScOr) && is_safe(&binary.left) && is_safe(&binary.right)
        }
        // Without an `else` the result may be undefined, which cannot be written.
        Expr::IfExpr(cond) => {
            is_safe(&cond.test_expr) && is_safe(&cond.true_expr) && cond.false_expr.as_ref().is_some_and(is_safe)
        }
        Expr::Filter(filter) => match (filter.name, filter.expr.as_ref(), filter.args.as_slice()) {
            ("d" | "default", Some(value), [CallArg::Pos(other)]) => is_safe(value) && is_safe(other),
            // These need a text, and at most treble it. A chain of them may grow beyond the limit.
            ("upper" | "lower" | "trim" | "capitalize" | "title" | "length" | "urlencode", Some(value), []) => {
                is_text(value)
            }
            _ => false,
        },
        _ => false,
    }
}

/// Whether the value is a variable, or a text instead of it.
fn is_text(expression: &Expr<'_>) -> bool {
    match expression {
        Expr::Var(_) => true,
        Expr::Const(constant) => constant.value.as_str().is_some(),
        Expr::Filter(filter) => match (filter.name, filter.expr.as_ref(), filter.args.as_slice()) {
            ("d" | "default", Some(value), [CallArg::Pos(other)]) => is_text(value) && is_text(other),
            _ => false,
        },
        _ => false,
    }
}

fn refuse(why: &str, line: u16) -> Error {
    // minijinja has no public way to set the line of an error.
    Error::new(ErrorKind::SyntaxError, format!("{why} (line {line})"))
}

/// Adds the filters. They are ours because minijinja's do not limit their results, and because its `escape` and
/// `safe` would let a template switch off the escaping of HTML.
pub(super) fn add_filters(env: &mut Environment<'_>) {
    env.add_filter("upper", |text: &str| bounded(text.to_uppercase()));
    env.add_filter("lower", |text: &str| bounded(text.to_lowercase()));
    env.add_filter("trim", |text: &str| text.trim().to_owned());
    env.add_filter("capitalize", |text: &str| bounded(capitalize(text)));
    env.add_filter("title", |text: &str| {
        bounded(text.split_inclusive(|c: char| !c.is_alphanumeric() && c != '\'').map(capitalize).collect())
    });
    env.add_filter("length", |text: &str| text.chars().count());
    env.add_filter("replace", replace);
    env.add_filter("urlencode", |text: &str| bounded(urlencode(text)));
    // Every variable is defined, so a default replaces an empty text.
    let default = |text: Value, other: Value| if text.is_true() { text } else { other };
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("int", |text: &str| text.trim().parse::<i64>().map_err(|_| not_a("whole number", text)));
    env.add_filter("float", |text: &str| text.trim().parse::<f64>().map_err(|_| not_a("number", text)));
}

fn capitalize(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars.flat_map(char::to_lowercase)).collect())
}

/// Replaces by hand: the size is known only while it grows, and an empty pattern matches everywhere.
fn replace(text: &str, from: &str, to: &str) -> Result<String, Error> {
    if from.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "replace needs a text to look for"));
    }
    let mut result = String::with_capacity(text.len());
    let mut parts = text.split(from);
    result.push_str(parts.next().unwrap_or_default());
    for part in parts {
        result.push_str(to);
        result.push_str(part);
        if result.len() > LONGEST {
            break;
        }
    }
    bounded(result)
}

/// For a value inside a link: everything but the unreserved characters of RFC 3986 is encoded.
fn urlencode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

fn bounded(text: String) -> Result<String, Error> {
    if text.len() > LONGEST {
        return Err(Error::new(ErrorKind::InvalidOperation, "the result of a filter is too long"));
    }
    Ok(text)
}

fn not_a(kind: &str, text: &str) -> Error {
    let text: String = text.chars().take(40).collect();
    Error::new(ErrorKind::InvalidOperation, format!("{text:?} is not a {kind}"))
}
