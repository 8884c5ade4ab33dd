"""Runs what was enqueued under these names, in any number of processes: examples/worker.py send_mail"""
import http.client, json, os, sqlite3, sys, time, urllib.parse, uuid
SEMEL = urllib.parse.urlsplit(os.environ.get("SEMEL_URL", "http://localhost:8080")).netloc

def post(path, **body):  # until there is an answer: a claim token or a fence makes a repeat harmless
    while True:
        try:
            semel = http.client.HTTPConnection(SEMEL, timeout=40)
            semel.request("POST", "/v1/operations" + path, json.dumps(body))
            answer = semel.getresponse()
            if "retry_after" not in (said := json.load(answer)):
                return answer.status, said
        except (OSError, http.client.HTTPException, ValueError):  # no answer, or half of one
            said = {"retry_after": 1}
        time.sleep(said["retry_after"])

effects = sqlite3.connect(os.environ.get("EFFECTS", "effects.db"), timeout=30, isolation_level=None)
effects.execute("CREATE TABLE IF NOT EXISTS effects (key TEXT PRIMARY KEY, input TEXT)")
while True:  # the answer comes when there is work, or after 20 s; all ten must end within the lease
    status, said = post("/next", operationNames=sys.argv[1:], max=10, wait=20, claimToken=str(uuid.uuid4()))
    status == 200 or sys.exit(said["detail"])
    for taken in said["operations"]:
        operation, fence = taken["operation"], taken["lease"]["fence"]
        try:  # after a lost lease it runs again (onLost "rerun"), so the effect must be harmless to repeat
            row = operation["idempotencyKey"], json.dumps(operation["input"])
            effects.execute("INSERT OR IGNORE INTO effects VALUES (?, ?)", row)
            end, content = "complete", {"resultData": {"pid": os.getpid()}}
        except Exception as error:
            end, content = "fail", {"errorMessage": repr(error)}
        post(f"/{operation['id']}/{end}", fence=fence, **content)  # a 409 says that another run decides
