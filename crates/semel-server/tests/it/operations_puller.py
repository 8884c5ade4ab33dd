"""A worker of the operations API, to be killed at any moment: pulls operations, and notes every effect.

    python operations_puller.py ADDRESS_FILE NOTES EFFECTS

ADDRESS_FILE has the address of the node, which may be killed, too, and come back at another address. NOTES gets a line
with every effect, so that two of one operation are seen. EFFECTS is a database whose table takes an effect once.
"""

import http.client, json, os, sqlite3, sys, time, uuid

address_file, notes, effects = sys.argv[1:]
notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
effects = sqlite3.connect(effects, timeout=60, isolation_level=None)
effects.execute("PRAGMA synchronous = OFF")  # processes are killed here, not the machine
effects.execute("CREATE TABLE IF NOT EXISTS effects (key TEXT PRIMARY KEY, worker INT)")
node = None


def call(path, body):
    """Makes a call until it is answered. Its token, or its fence and content, make that harmless."""
    global node
    while True:
        try:
            if node is None:
                with open(address_file) as file:
                    node = http.client.HTTPConnection(file.read(), timeout=40)
            node.request("POST", "/v1/operations" + path, json.dumps(body), {"Content-Type": "application/json"})
            answer = node.getresponse()
            text = answer.read()
            if answer.status < 500:
                return answer.status, json.loads(text)
        except (OSError, http.client.HTTPException):
            pass
        node = None
        time.sleep(0.02)


def run(operation):
    """The effect. A mail may be asked for again, so its place takes it once; a card is charged however often it is asked."""
    name, key = operation["operationName"], operation["idempotencyKey"]
    known = False
    if name == "mail":
        done = effects.execute("INSERT INTO effects VALUES (?, ?) ON CONFLICT DO NOTHING", (key, os.getpid()))
        known = done.rowcount == 0
    os.write(notes, f"{name} {key}{' known' if known else ''}\n".encode())
    return {"n": operation["input"]["n"]}


while True:
    pull = {"operationNames": ["card", "mail"], "max": 5, "leaseSeconds": 8, "wait": 5, "claimToken": str(uuid.uuid4())}
    status, pulled = call("/next", pull)
    assert status == 200, pulled
    for held in pulled["operations"]:
        result = run(held["operation"])
        status, said = call(f"/{held['operation']['id']}/complete", {"fence": held["lease"]["fence"], "resultData": result})
        assert status == 200, said
