// Labels: concurrency
// A run's folder is locked by a file in it, which other machines see, and directly, as by earlier versions.
#include "io/folder_lock.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "support/scratch_folder.hpp"

namespace folder_lock_test {

namespace fs = std::filesystem;
using lockstep::ScratchFolder;
using lockstep::io::FileLock;
using lockstep::io::FolderLock;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

// fcntl()'s lock of a process, as an NFS server takes it for another machine. It ends with the process.
bool lock_as_a_server(const char* file) {
  const int fd = ::open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  return fd >= 0 && ::fcntl(fd, F_SETLK, &whole) == 0;
}

// The flock() of an earlier version of lockstep.
bool lock_folder_alone(const char* folder) {
  const int fd = ::open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) == 0;
}

// Another process, which took a lock or not, until it is ended.
class Process {
 public:
  Process(bool (*lock)(const char*), const std::string& path) {
    int ends[2] = {};
    EXPECT_EQ(pipe(ends), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const char got = lock(path.c_str()) ? 'y' : 'n';
      if (write(ends[1], &got, 1) == 1) pause();
      _exit(1);
    }
    char got = 0;
    EXPECT_EQ(read(ends[0], &got, 1), 1);
    got_ = got == 'y';
    close(ends[0]);
    close(ends[1]);
  }
  ~Process() { kill_it(); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool got() const { return got_; }

  void kill_it() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  bool got_ = false;
};

TEST(FolderLock, KeepsOutOtherMachinesAndTheyIt) {
  const ScratchFolder folder;
  const std::string file = (folder / ".lock").string();
  {
    FolderLock lock;
    ASSERT_TRUE(lock.take(folder.path()));
    EXPECT_THAT(lock.doubt(), IsEmpty());
    EXPECT_FALSE(Process(lock_as_a_server, file).got());
  }
  Process other(lock_as_a_server, file);  // there is no holder any more
  ASSERT_TRUE(other.got());
  FolderLock refused;
  EXPECT_FALSE(refused.take(folder.path()));
  EXPECT_THAT(refused.advice(),
              AllOf(HasSubstr("wait for it, or stop it, on the machine where it runs"), HasSubstr("remove " + file)));
  other.kill_it();
  EXPECT_TRUE(FolderLock().take(folder.path()));
  EXPECT_THAT(folder.names(), testing::ElementsAre(".lock"));
}

TEST(FolderLock, KeepsOutEarlierVersionsAndTheyIt) {
  const ScratchFolder folder;
  {
    FolderLock lock;
    ASSERT_TRUE(lock.take(folder.path()));
    EXPECT_FALSE(Process(lock_folder_alone, folder.path().string()).got());
  }
  const Process other(lock_folder_alone, folder.path().string());
  ASSERT_TRUE(other.got());
  FolderLock refused;
  EXPECT_FALSE(refused.take(folder.path()));
  EXPECT_EQ(refused.advice(), "wait for it, or stop it");
}

TEST(FolderLock, AFileThatCannotBeOpenedLeavesTheFoldersLockAndADoubt) {
  const ScratchFolder folder;
  fs::create_directory(folder / ".lock");
  FolderLock lock, second;
  ASSERT_TRUE(lock.take(folder.path()));
  EXPECT_THAT(lock.doubt(),
              AllOf(HasSubstr(folder.path().string() + " is locked on this machine alone"), HasSubstr("a directory")));
  EXPECT_FALSE(second.take(folder.path()));
}

// A process that ends a run which has kept nothing removes the file. Whoever had opened it then must not hold a lock of
// a file that is gone, beside another one's of the file that is there.
TEST(FileLock, OneAtATimeHoldsItThoughHoldersRemoveTheFile) {
  const ScratchFolder folder;
  std::atomic<int> holders = 0, taken = 0;
  std::atomic<bool> two = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (taken < 200 && !two) {
        FileLock lock;
        if (lock.take(folder / ".lock") != FileLock::Outcome::held) continue;
        if (++holders > 1) two = true;
        ++taken;
        std::this_thread::yield();
        --holders;
        lock.remove();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(two);
  EXPECT_THAT(folder.names(), IsEmpty());
}

}  // namespace folder_lock_test
