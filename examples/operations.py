"""Submits a claim once, however often it is started: examples/operations.py proc-123 CLM-001"""
import http.client, json, os, sys, time, urllib.parse, uuid
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

process, claim = sys.argv[1:]
status, said = post("", operationName="submit_claim", processInstanceId=process, activityId="Task_SubmitClaim",
                    input={"claimId": claim}, claimToken=str(uuid.uuid4()), leaseSeconds=60)
if status == 201:  # ours until leaseExpiresAt: this work ends sooner, longer work renews its lease
    path, fence = f"/{said['operation']['id']}", said["lease"]["fence"]
    try:
        with open(os.environ.get("PORTAL", "portal.txt"), "a") as portal:  # stands for the call of a portal
            portal.write(claim + "\n")
    except Exception as error:  # it may have taken effect, so a person decides; if it surely has not: /fail
        post(path + "/doubt", fence=fence, reason=repr(error))
        raise
    status, said = post(path + "/complete", fence=fence, resultData={"claimId": claim, "status": "approved"})
status == 200 or sys.exit(said["detail"])  # in doubt, out of attempts, or the lease was lost
print(json.dumps(said.get("operation", said)["resultData"]))
