# A container of SageMaker's contract, in shell: reports what it was given, does what its hyperparameters say, and exits.
#   SM_HP_SLEEP       seconds to run (0)
#   SM_HP_EXIT_CODE   the code to exit with (0)
#   SM_HP_TERM_CODE   the code to exit with on SIGTERM (143)
#   SM_HP_FAILURE     text for /opt/ml/output/failure
# Works in any POSIX shell; under busybox its applets are found without a PATH.

trap 'echo "got SIGTERM"; exit "${SM_HP_TERM_CODE:-143}"' TERM

echo "arguments: $*"
echo "--- environment"
env | sort
echo "--- files"
for root in /opt/ml /var/run/secrets/everstep; do
    [ -d "$root" ] && find "$root" -type f -o -type l | sort
done
for file in /opt/ml/input/config/*.json; do
    [ -f "$file" ] && echo "--- $file" && cat "$file" && echo
done
echo "--- end"

# In the background, since a shell runs its traps between commands only.
sleep "${SM_HP_SLEEP:-0}" &
wait $!

[ -n "$SM_HP_FAILURE" ] && echo "$SM_HP_FAILURE" >/opt/ml/output/failure
exit "${SM_HP_EXIT_CODE:-0}"
