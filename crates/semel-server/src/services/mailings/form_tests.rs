use axum::extract::DefaultBodyLimit;

use super::*;

/// A form that arrives in parts of 4 KiB, all of which are there at once.
async fn form(parts: impl Iterator<Item = Vec<u8>> + Send + 'static, read: Arc<AtomicUsize>) -> Form {
    let parts = parts.map(move |part| {
        read.fetch_add(part.len(), Ordering::Relaxed);
        Ok::<_, std::io::Error>(Bytes::from(part))
    });
    let request = Request::post("/").header("content-type", "multipart/form-data; boundary=b");
    let mut request = request.body(Body::from_stream(stream::iter(parts))).unwrap();
    // As the route does.
    DefaultBodyLimit::disable().apply(&mut request);
    Form::of(request).await.unwrap()
}

/// Reads a form to its end; the content of its fields.
async fn contents(mut form: Form) -> Result<Vec<(String, usize)>, Problem> {
    let mut all = Vec::new();
    while let Some(part) = form.next().await? {
        let (name, content) = (part.name.clone(), std::pin::pin!(part.content()));
        let bytes = content.try_fold(0, async |bytes, part| Ok(bytes + part.len())).await?;
        all.push((name, bytes));
    }
    Ok(all)
}

fn head(name: &str) -> Vec<u8> {
    format!("\r\n--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n").into_bytes()
}

const MIB: usize = 1 << 20;

#[tokio::test]
async fn what_belongs_to_no_field_is_not_kept_in_memory() {
    let junk = || std::iter::repeat_n(vec![b'x'; 4 << 10], 10 * MIB / (4 << 10));
    let begun = |text: &str| std::iter::once(text.as_bytes().to_vec());
    let forms: [Box<dyn Iterator<Item = Vec<u8>> + Send>; 4] = [
        Box::new(junk()),
        Box::new(begun("--b\r\nx-head: ").chain(junk())),
        Box::new(begun("--b").chain(std::iter::repeat_n(vec![b' '; 4 << 10], 2_560))),
        Box::new(std::iter::once([&head("a")[2..], b"a", &head("b"), b"b\r\n--b\r\nx-head: "].concat()).chain(junk())),
    ];
    for parts in forms {
        let read = Arc::new(AtomicUsize::new(0));
        let problem = contents(form(parts, read.clone()).await).await.unwrap_err();
        assert_eq!(*problem.kind(), INVALID_UPLOAD, "{problem:?}");
        assert!(read.load(Ordering::Relaxed) < OUTSIDE + (16 << 10), "{read:?} bytes were read");
    }
}

#[tokio::test]
async fn a_field_of_any_length_is_read_part_by_part() {
    let read = Arc::new(AtomicUsize::new(0));
    let parts = std::iter::once(head("file")[2..].to_vec())
        .chain(std::iter::repeat_n(vec![b'x'; 4 << 10], 10 * MIB / (4 << 10)))
        .chain([head("many")])
        .chain((0..200).flat_map(|n| [b"y".to_vec(), head(&n.to_string())]))
        .chain([b"\r\n--b--\r\n".to_vec()]);
    let mut form = form(parts, read.clone()).await;
    {
        let part = form.next().await.unwrap().unwrap();
        let mut content = std::pin::pin!(part.content());
        let mut used = 0;
        while let Some(part) = content.try_next().await.unwrap() {
            used += part.len();
            let held = read.load(Ordering::Relaxed) - used;
            assert!(held < OUTSIDE + (16 << 10), "{held} bytes are held");
        }
        assert_eq!(used, 10 * MIB);
    }
    assert_eq!(contents(form).await.unwrap().len(), 201);
}

#[tokio::test]
async fn a_form_that_is_cut_off_is_incomplete() {
    let problem = contents(form(std::iter::once(head("a")[2..].to_vec()), Arc::default()).await).await.unwrap_err();
    assert_eq!(*problem.kind(), BODY_INCOMPLETE);
}

#[test]
fn file_names_are_read_in_every_form_that_clients_send() {
    for (value, name, filename) in [
        ("form-data; name=\"file\"; filename=\"a.csv\"", "file", Some("a.csv")),
        ("form-data; name=file; filename=a.csv", "file", Some("a.csv")),
        ("form-data; filename=\"a; name=x.csv\"; name=\"file\"", "file", Some("a; name=x.csv")),
        ("form-data; name=\"file\"; filename=\"a \\\"b\\\".csv\"", "file", Some("a \"b\".csv")),
        ("form-data; name=\"file\"; filename=\"C:\\x\\a.csv\"", "file", Some("C:\\x\\a.csv")),
        ("form-data; name=\"file\"; filename*=UTF-8''caf%C3%A9.csv", "file", Some("café.csv")),
        ("form-data; filename*=utf-8'de'caf%C3%A9.csv; name=file", "file", Some("café.csv")),
        ("form-data; filename*=UTF-8''new.csv; filename=old.csv; name=file", "file", Some("new.csv")),
        ("form-data; name=file; filename=old.csv; filename*=UTF-8''new.csv", "file", Some("new.csv")),
        ("form-data; name=file; filename=old.csv; filename*=latin1''n%e9.csv", "file", Some("old.csv")),
        ("form-data; name=file; filename=old.csv; filename*=UTF-8''%ff", "file", Some("old.csv")),
        ("form-data; NAME=\"file\"; FileName = \"a.csv\" ; x=y", "file", Some("a.csv")),
        ("form-data; name=\"subject\"", "subject", None),
        ("form-data; filename=\"open", "", None),
        ("form-data", "", None),
        ("", "", None),
    ] {
        let found = Disposition::parse(value);
        assert_eq!((found.name.as_deref().unwrap_or_default(), found.filename.as_deref()), (name, filename), "{value}");
    }
}
